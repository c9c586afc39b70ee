"""Numbers of layers and experts: a rank counts its own, a chunk of the model does, the whole model does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from mindspeed_precision.dump.reader import RankRecords
from mindspeed_precision.msprobe.names import EntryName

_NUMBERED = ("layers", "local_experts")
"""Lists of modules that a rank numbers from 0 and the whole model does not."""


def layers_before(modules: Iterable[EntryName]) -> dict[int, dict[str, int]]:
    """Return by chunk, and by name of a list of layers, how many layers earlier chunks have."""
    sizes: dict[str, dict[int, int]] = {}
    for name in modules:
        parts = name.path.split(".")
        for at, part in enumerate(parts[:-1]):
            if part == "layers" and parts[at + 1].isdigit():
                of_list = sizes.setdefault(".".join(parts[: at + 1]), {})
                chunk = name.chunk or 0
                of_list[chunk] = max(of_list.get(chunk, 0), int(parts[at + 1]) + 1)
                break
    before: dict[int, dict[str, int]] = {}
    for path, of_list in sizes.items():
        total = 0
        for chunk in sorted(of_list):
            before.setdefault(chunk, {})[path] = total
            total += of_list[chunk]
    return before


def numbers_of(rank: RankRecords, other: RankRecords) -> Mapping[str, Mapping[int, int]]:
    """Return by list of modules which number of the whole model each number of the rank is."""
    found: dict[str, Mapping[int, int]] = {}
    for name in _NUMBERED:
        own, theirs = (
            sorted({n for r in side.records for n in _numbers_in(r.key.fqn, name)}) for side in (rank, other)
        )
        if own != theirs and len(own) == len(theirs):
            found[name] = dict(zip(own, theirs, strict=True))
    return found


def _numbers_in(fqn: str, name: str) -> Iterable[int]:
    parts = fqn.split(".")
    return (int(b) for a, b in pairwise(parts) if a == name and b.isdigit())


def renumbered(fqn: str, numbers: Mapping[str, Mapping[int, int]]) -> str:
    """Return a name with the numbers of the whole model."""
    if not numbers:
        return fqn
    parts = fqn.split(".")
    for at, part in enumerate(parts[:-1]):
        if part in numbers and parts[at + 1].isdigit():
            parts[at + 1] = str(numbers[part].get(int(parts[at + 1]), int(parts[at + 1])))
    return ".".join(parts)
