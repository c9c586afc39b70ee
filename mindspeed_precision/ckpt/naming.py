"""Names of parameters under megatron-core's, by the table ``configs/checkpoints/names.yaml``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from mindspeed_precision.align.mapping import Mapping as NameMapping
from mindspeed_precision.align.mapping import Rename, read_rename
from mindspeed_precision.config import data_directory, read_document
from mindspeed_precision.errors import ConfigError

PARTS = ("", "q", "k", "v", "qkv", "gate", "up")
_WRAPPERS = ("module.", "base_model.model.")


class Place(NamedTuple):
    """Where a tensor belongs.

    Attributes:
        name: of the parameter, megatron-core's.
        part: which part of it; empty: all of it, in Megatron's order.
    """

    name: str
    part: str


@dataclass
class _Schema:
    schema: int = 1
    names: list[dict[str, str]] = field(default_factory=list)


@cache
def _table() -> Mapping[str, tuple[tuple[Rename, str], ...]]:
    """Return the renames by the first part of their names."""
    path = data_directory("configs") / "checkpoints" / "names.yaml"
    plain = read_document(path, _Schema, kind="table of names", remedy="see docs/ckpt.md")
    found: dict[str, list[tuple[Rename, str]]] = {}
    for number, entry in enumerate(plain["names"]):
        where = f"{path}: names[{number}]"
        part = entry.pop("part", "")
        if part not in PARTS:
            raise ConfigError(
                "no such part", where=where, found=part, expected=", ".join(filter(None, PARTS))
            )
        rename = read_rename(where, entry)
        found.setdefault(rename.source.partition(".")[0], []).append((rename, part))
    return {first: tuple(entries) for first, entries in found.items()}


def place_of(name: str, mappings: Sequence[NameMapping] = ()) -> Place:
    """Return where a tensor of a checkpoint belongs; a name that is in no table stands for itself.

    Args:
        name: as the checkpoint has it.
        mappings: the user's, applied first; a name that they give is final unless the table knows it.
    """
    for wrapper in _WRAPPERS:
        while name.startswith(wrapper):
            name = name.removeprefix(wrapper)
    for mapping in mappings:
        name = mapping.rename(name)[0]
    return _place(name)


@cache
def _place(name: str) -> Place:
    best: tuple[int, Place] | None = None
    for rename, part in _table().get(name.partition(".")[0], ()):
        found = rename.apply(name)
        if found is not None and (best is None or found[0] > best[0]):
            best = found[0], Place(found[1], part)
    return Place(name, "") if best is None else best[1]


__all__ = ["PARTS", "Place", "place_of"]
