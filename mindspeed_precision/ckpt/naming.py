"""Names of parameters under megatron-core's, by the table ``configs/checkpoints/names.yaml``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from mindspeed_precision.align.mapping import Mapping as NameMapping
from mindspeed_precision.align.mapping import Rename, read_rename
from mindspeed_precision.config import data_directory, read_document
from mindspeed_precision.errors import ConfigError

PARTS = ("", "q", "k", "v", "qkv", "gate", "up", "q_down", "kv_down")
_WRAPPERS = {
    **dict.fromkeys(("module.", "base_model.model.", "language_model."), ""),
    "model.language_model.": "model.",
}
"""What stands around a language model, and what is left of it."""

_CAPTURED = re.compile(r"\{(\w+)\}")
_PREDICTS = re.compile(r"model\.layers\.(\d+)\.eh_proj\.weight")
_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_OF_MTP = re.compile(r"mtp\.layers\.(\d+)\.(?:transformer_layer|mtp_model_layer)\.(.+)")
_ANSWERED = (
    (re.compile(r"^decoder\.layers\.mtp(\d+)\."), r"mtp.layers.\1.mtp_model_layer."),
    (re.compile(r"^mtp\.layers\.mtp(\d+)\."), r"mtp.layers.\1."),
)
"""What megatron-core >= 0.17 calls a layer that predicts further tokens, and what stands around it."""


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


class _Entry(NamedTuple):
    """A line of the table.

    Attributes:
        rename: from the checkpoint's name.
        part: see ``Place``.
        beside: a tensor that the checkpoint must have, too, for the line to count; empty for none.
    """

    rename: Rename
    part: str
    beside: str


@cache
def _table() -> Mapping[str, tuple[_Entry, ...]]:
    """Return the renames by the first part of their names."""
    path = data_directory("configs") / "checkpoints" / "names.yaml"
    plain = read_document(path, _Schema, kind="table of names", remedy="see docs/ckpt.md")
    found: dict[str, list[_Entry]] = {}
    for number, entry in enumerate(plain["names"]):
        where = f"{path}: names[{number}]"
        part, beside = entry.pop("part", ""), entry.pop("beside", "")
        if part not in PARTS:
            raise ConfigError(
                "no such part", where=where, found=part, expected=", ".join(filter(None, PARTS))
            )
        rename = read_rename(where, entry)
        first = rename.source.partition(".")[0]
        found.setdefault(first, []).append(_Entry(rename=rename, part=part, beside=beside))
    return {first: tuple(entries) for first, entries in found.items()}


def unwrapped(name: str) -> str:
    """Return the name of a tensor of a language model without what stands around that."""
    while wrapper := next((one for one in _WRAPPERS if name.startswith(one)), ""):
        name = _WRAPPERS[wrapper] + name.removeprefix(wrapper)
    return name


class Neighbours:
    """What a checkpoint has, by names as the table is asked: some names mean one thing beside others.

    Args:
        names: of everything in it.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        own = set(map(unwrapped, names))
        predicting = [int(found.group(1)) for found in map(_PREDICTS.fullmatch, own) if found]
        self._first = min(predicting, default=None)
        self.names: frozenset[str] = frozenset(map(self.asked, own))

    def asked(self, name: str) -> str:
        """Return the name under which the table is asked for a tensor.

        Layers that predict further tokens are layers with numbers of their own (``mtp0``); Hugging Face
        numbers them after the model's.
        """
        match = _OF_MTP.fullmatch(name)
        if match is not None:
            return f"decoder.layers.mtp{match.group(1)}.{match.group(2)}"
        match = _OF_LAYER.fullmatch(name)
        if match is None or self._first is None or int(match.group(1)) < self._first:
            return name
        return f"model.layers.mtp{int(match.group(1)) - self._first}.{match.group(2)}"


def place_of(name: str, mappings: Sequence[NameMapping] = (), neighbours: Neighbours | None = None) -> Place:
    """Return where a tensor of a checkpoint belongs; a name that is in no table stands for itself.

    Args:
        name: as the checkpoint has it.
        mappings: the user's, applied first; a name that they give is final unless the table knows it.
        neighbours: what else the checkpoint has; None: not known.
    """
    name, around = unwrapped(name), neighbours or Neighbours()
    for mapping in mappings:
        name = mapping.rename(name)[0]
    place = _placed(around.asked(name), around)
    own = place.name
    for pattern, canonical in _ANSWERED:
        own = pattern.sub(canonical, own)
    return Place(own, place.part)


def _placed(name: str, around: Neighbours) -> Place:
    for place, beside in _candidates(name):
        if not beside or beside in around.names:
            return place
    return Place(name, "")


@cache
def _candidates(name: str) -> tuple[tuple[Place, str], ...]:
    """Return where a tensor may belong and beside what, the line that speaks of more of its name first."""
    found = []
    for entry in _table().get(name.partition(".")[0], ()):
        match, renamed = entry.rename.pattern.match(name), entry.rename.apply(name)
        if match is not None and renamed is not None:
            parts = match.groupdict()
            beside = _CAPTURED.sub(lambda one: parts[one.group(1)], entry.beside)  # noqa: B023
            found.append((renamed[0], bool(beside), Place(renamed[1], entry.part), beside))
    found.sort(key=lambda one: one[:2], reverse=True)
    return tuple((place, beside) for _, _, place, beside in found)


__all__ = ["PARTS", "Neighbours", "Place", "place_of", "unwrapped"]
