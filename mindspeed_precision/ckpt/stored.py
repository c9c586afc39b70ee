"""A tensor of a checkpoint, and a checkpoint: what every format is read into."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.counting import count
from mindspeed_precision.dump.payload import representable
from mindspeed_precision.errors import CheckpointError
from mindspeed_precision.record.placement import places_of
from mindspeed_precision.records import Placement, TensorRecord

Bits = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor that is read when it is needed.

    Attributes:
        name: what the checkpoint calls it.
        shape: its shape.
        dtype: framework-neutral name of the element type.
        source: the files that it comes from, in words.
        load: returns its elements as unsigned integers, ``[...]`` of its shape, a view of the file where
            that is possible; None: no elements were kept, only what ``record`` says of them.
        record: of a run directory, what was recorded.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    source: str
    load: Callable[[], Bits] | None
    record: TensorRecord | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def bits(self) -> Bits:
        """Return the elements; see ``load``.

        Raises:
            CheckpointError: there are none, or the file does not have them.
        """
        if self.load is None:
            raise CheckpointError("only digests were recorded of this tensor", where=self.name)
        if not representable(self.shape):
            found = str(self.shape[:33])
            raise CheckpointError(
                "a shape that no tensor has", where=f"{self.source}: {self.name}", found=found
            )
        elements = self.load()
        if elements.shape != self.shape:
            raise CheckpointError(
                "elements do not fit the shape",
                where=self.source,
                found=str(elements.shape),
                expected=str(self.shape),
            )
        return elements

    def host(self) -> HostTensor:
        """Return the elements with their type."""
        return HostTensor(bits=np.ascontiguousarray(self.bits()), dtype=self.dtype)

    def changed(self, change: Callable[[Bits], Bits], shape: Sequence[int], *, name: str = "") -> Stored:
        """Return what a change of the elements makes of it (rows taken, transposed, reshaped)."""
        load = self.load
        assert load is not None, "of digests alone nothing can be changed"
        return replace(
            self, name=name or self.name, shape=tuple(shape), load=lambda: change(load()), record=None
        )


def joined(
    pieces: Sequence[tuple[Stored, Placement]], shape: Sequence[int], *, name: str, source: str
) -> Stored:
    """Return the canonical tensor of which shards are parts.

    Args:
        pieces: the shards and where each sits; disjoint, and together all of it.
        shape: canonical.
        name: of the result.
        source: where it comes from, in words.

    Raises:
        CheckpointError: the shards are not all of it, or of several element types.
    """
    whole, held = tuple(shape), sum(piece.numel for piece, _ in pieces)
    kinds = sorted({piece.dtype for piece, _ in pieces})
    if held != math.prod(whole) or len(kinds) != 1:
        raise CheckpointError(
            "shards that are not one tensor",
            where=f"{source}: {name}",
            found=f"{count(held, 'element')} of {', '.join(kinds)}",
            expected=f"{math.prod(whole)} elements for shape {list(whole)}, of one type",
        )
    if len(pieces) == 1 and pieces[0][0].shape == whole:
        return replace(pieces[0][0], name=name, source=source)

    def load() -> Bits:
        out: Bits | None = None
        for piece, placement in pieces:
            bits = piece.bits()
            if out is None:
                out = np.empty(whole, bits.dtype)
            out[_region(placement, whole)] = bits
        assert out is not None
        return out

    return Stored(name=name, shape=whole, dtype=kinds[0], source=source, load=load)


def _region(placement: Placement, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the index of a shard in the canonical tensor: slices, or rows by number."""
    index: list[Any] = [slice(None)] * len(shape)
    for split in placement.splits:
        first, length = split.blocks[0]
        index[split.dim] = slice(first, first + length) if len(split.blocks) == 1 else places_of(split)
    return tuple(index)


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What of a model's heads is known: needed to order query, key and value.

    Attributes:
        heads: attention heads; 0: not known.
        groups: query groups (heads of key and value); 0: not known.
    """

    heads: int = 0
    groups: int = 0


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Copies of one tensor that should be equal and are not.

    Attributes:
        name: canonical.
        holders: the files that hold it, grouped by bits.
    """

    name: str
    holders: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What was read of one checkpoint, under its own names, shards put together.

    Attributes:
        path: as it was given.
        form: its format, in words.
        family: ``megatron``, ``huggingface``, ``mindspore``, ``torch`` or ``run``.
        tensors: parameters and buffers, by name.
        states: by role (``exp_avg``, ``exp_avg_sq``, ``master_param``), what the optimizer keeps, by the
            name of the parameter.
        loose: what the optimizer keeps and is not known to be of a parameter, by its own name.
        config: the model's and the training's configuration.
        rest: everything else that was saved, as plain data.
        geometry: of the heads.
        copies: copies that differ.
        ranks: how many ranks' files it has, where each has copies of its own.
        unread: what is in the checkpoint and was not read, and why.
        notes: what a reader must know.
    """

    path: str
    form: str
    family: str
    tensors: Mapping[str, Stored]
    states: Mapping[str, Mapping[str, Stored]] = field(default_factory=dict)
    loose: Mapping[str, Stored] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    rest: Mapping[str, Any] = field(default_factory=dict)
    geometry: Geometry = Geometry()
    copies: tuple[Copies, ...] = ()
    ranks: int = 1
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def geometry_of(config: Mapping[str, Any]) -> Geometry:
    """Return what a configuration of Megatron, Hugging Face or MindFormers says of the heads."""
    heads = _number(config, "num_attention_heads", "num_heads", "n_head")
    asked = config.get("group_query_attention")
    groups = _number(config, "num_query_groups", "num_key_value_heads", "n_kv_heads", "multi_query_group_num")
    if asked is False or not groups:
        groups = heads
    return Geometry(heads=heads, groups=groups)


def _number(config: Mapping[str, Any], *names: str) -> int:
    found = next((config[name] for name in names if type(config.get(name)) is int), 0)
    return found if found > 0 else 0


__all__ = ["Bits", "Checkpoint", "Copies", "Geometry", "Stored", "geometry_of", "joined"]
