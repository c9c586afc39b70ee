"""Into which parts a run is taken to be checked, and how much memory each needs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_precision.dump.attempts import attempt_directories
from mindspeed_precision.dump.format import INDEX, MANIFEST, Header, parse_line, rank_directory
from mindspeed_precision.dump.inside import require_inside
from mindspeed_precision.engines import Resources
from mindspeed_precision.errors import DumpError
from mindspeed_precision.records import ParameterDeclaration, RankCoordinates
from mindspeed_precision.verify.spans import Span

PER_BYTE = 4.0
"""Bytes of memory for each byte of an index while its rank is checked: under 3 were measured."""

PER_RECORD = 1500
"""Bytes of memory for each record that is kept, with what a law makes of it."""


_SHARES = 4
"""Into how many parts of memory a stage is made to fit, so that as many workers find room."""


_LEAST = 8 << 20
"""Bytes that are always there for the records of a stage: a process takes more by itself."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Ranks that are loaded together.

    Attributes:
        ranks: ascending.
        expected: how many there are where every rank records.
        need: bytes of memory.
    """

    ranks: tuple[int, ...]
    expected: int
    need: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The parts of a run.

    Attributes:
        cells: replicas; or single ranks, where memory does not hold a replica.
        coordinates: where the ranks sit whose index says so.
        spans: what is checked in the cells.
        whole: bytes of memory that the whole run needs.
        replica: bytes of memory that the largest replica needs.
    """

    cells: tuple[Cell, ...]
    coordinates: Mapping[int, RankCoordinates]
    spans: frozenset[Span]
    whole: int
    replica: int


def needs_cells(path: Path, resources: Resources) -> bool:
    """Tell whether a run is larger than memory may be; False for what is no run of ours."""
    return (path / MANIFEST).is_file() and needed(path) > resources.memory


def needed(path: Path) -> int:
    """Return the bytes of memory that a check of a whole run needs."""
    indices = path.glob(f"**/rank*/{INDEX}")
    return int(sum(index.stat().st_size for index in indices if index.is_file()) * PER_BYTE)


def why_not(path: Path) -> str:
    """Say why a run cannot be checked in parts; empty where it can."""
    return "it was restarted" if attempt_directories(path) else ""


def plan(path: Path, numbers: Sequence[int], resources: Resources) -> Plan:
    """Return the parts of a run.

    Args:
        path: of the run.
        numbers: its ranks, ascending.
        resources: memory.
    """
    sizes = {number: _size(path, number) for number in numbers}
    found = {number: _coordinates(path / rank_directory(number) / INDEX) for number in numbers}
    coordinates = {number: where for number, where in found.items() if where is not None}
    replicas: dict[object, list[int]] = defaultdict(list)
    for number in numbers:
        where = coordinates.get(number)
        replicas[("rank", number) if where is None else _block(where)].append(number)
    cells = [_cell(members, coordinates, sizes) for members in replicas.values()]
    replica = max(cell.need for cell in cells)
    spans = frozenset({Span.RANK, Span.REPLICA})
    if replica > resources.memory and any(len(cell.ranks) > 1 for cell in cells):
        cells = [Cell(ranks=(number,), expected=1, need=_need([sizes[number]])) for number in numbers]
        spans = frozenset({Span.RANK})
    return Plan(
        cells=tuple(cells),
        coordinates=coordinates,
        spans=spans,
        whole=_need(sizes.values()),
        replica=replica,
    )


def workers(resources: Resources, need: int, tasks: int) -> int:
    """Return how many processes may work at once, each with ``need`` bytes."""
    return max(1, min(resources.workers, tasks, resources.memory // max(need, 1)))


def _size(path: Path, rank: int) -> int:
    index = path / rank_directory(rank) / INDEX
    return index.stat().st_size if index.is_file() else 0


def _need(sizes: Iterable[int]) -> int:
    return int(sum(sizes) * PER_BYTE)


def _cell(
    members: Sequence[int], coordinates: Mapping[int, RankCoordinates], sizes: Mapping[int, int]
) -> Cell:
    where = coordinates.get(members[0])
    expected = 1 if where is None else where.world_size // where.dp_size * _lanes(where)
    return Cell(ranks=tuple(members), expected=expected, need=_need(sizes[one] for one in members))


def _block(where: RankCoordinates) -> int:
    """Return what ranks have in common that compute one part of the batch, experts of several together."""
    return where.dp_rank // max(where.ep_size, 1)


def _lanes(where: RankCoordinates) -> int:
    """Return how many data-parallel ranks are in a rank's block."""
    size = max(where.ep_size, 1)
    return min(size, where.dp_size - _block(where) * size)


def _coordinates(index: Path) -> RankCoordinates | None:
    """Return where a rank sits; None where that is for the reader to refuse."""
    try:
        require_inside(index, index.parent.parent)
        with index.open("rb") as file:
            text = file.readline(1 << 16)
        line = parse_line(text, where=str(index)) if text.endswith(b"\n") else None
    except (OSError, DumpError):
        return None
    return line.coordinates if isinstance(line, Header) else None


def stages(
    coordinates: Mapping[int, RankCoordinates], parameters: Mapping[int, tuple[ParameterDeclaration, ...]]
) -> list[frozenset[int]]:
    """Return the pipeline stages, those together that share a parameter."""
    holders: dict[str, set[int]] = defaultdict(set)
    distinct = {(coordinates[rank].pp_rank, id(declared)): declared for rank, declared in parameters.items()}
    for (stage, _), declared in distinct.items():
        for parameter in declared:
            copied = parameter.placement.copy_of if parameter.placement else ""
            holders[copied or parameter.fqn].add(stage)
    groups = {where.pp_rank: {where.pp_rank} for where in coordinates.values()}
    for together in holders.values():
        merged = set[int]().union(*(groups[stage] for stage in together))
        groups.update(dict.fromkeys(merged, merged))
    return sorted({frozenset(group) for group in groups.values()}, key=min)


def slices(records: int, resources: Resources) -> int:
    """Return into how many parts the records of a stage are taken."""
    return max(1, math.ceil(records * PER_RECORD / max(resources.memory // _SHARES, _LEAST)))


def mebibytes(size: float) -> str:
    """Return a size for a person, and for ``--memory``."""
    return f"{size / (1 << 30):.1f}GiB" if size >= 1 << 30 else f"{max(math.ceil(size / (1 << 20)), 1)}MiB"
