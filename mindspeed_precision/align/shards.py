"""Shards of canonical tensors, and the records and elements that they are put together to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump.reader import RankRecords, Run
from mindspeed_precision.record.elements import to_bits, to_numbers
from mindspeed_precision.record.placement import (
    CONTEXT_GROUP,
    canonical_index,
    places_of,
    term_of,
    without_sum,
)
from mindspeed_precision.records import Part, RankCoordinates, Split, TensorRecord


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A rank's record of a part of a canonical tensor.

    Attributes:
        rank: the rank.
        where: it sits in the layout.
        record: what it recorded.
        part: which elements these are.
        factor: what the record has to be multiplied by; 1 but for gradients of a batch that is split
            otherwise.
        term: which term of a sum over a step it is, and of how many; None: its placement says that.
    """

    rank: int
    where: RankCoordinates
    record: TensorRecord
    part: Part
    factor: float = 1.0
    term: tuple[int, int] | None = None

    @property
    def place(self) -> tuple[object, ...]:
        """What replicas of one shard have in common."""
        return self.part.placement.splits, self.part.start, self.part.stop

    @property
    def term_of(self) -> tuple[int, int]:
        """Which term of a sum it is, and of how many there are: of what is no sum the one."""
        if self.term is not None:
            return self.term
        return term_of(self.part.placement, self.where) if self.part.placement.partial else (0, 1)


@dataclass(frozen=True, kw_only=True)
class Merged:
    """A canonical record before it has a number.

    Attributes:
        order: its place in the execution of the whole model.
        record: the record.
        shards: what its elements are put together from; empty for a record that is one rank's as it is.
        source: the rank and the record that it is, else.
        held_by: the ranks that hold it.
        copies: further records of the same key: copies on other ranks that should be equal and are not.
    """

    order: tuple[object, ...]
    record: TensorRecord
    shards: tuple[Shard, ...] = ()
    source: tuple[int, TensorRecord] | None = None
    held_by: tuple[int, ...] = ()
    copies: tuple[Merged, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CanonicalRank(RankRecords):
    """One lane of a canonical run: merged records, numbered anew.

    Attributes:
        run: the run as it was recorded, for elements.
        merged: by ``seq``, how each record came about.
        elsewhere: parameters that no rank of this lane holds: experts of other lanes.
        copies: by ``seq``, further records of the same key, with numbers of their own, which ``records``
            lacks.
    """

    run: Run
    merged: Mapping[int, Merged] = field(default_factory=dict)
    copies: Mapping[int, tuple[TensorRecord, ...]] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()

    def holds(self, fqn: str) -> bool:
        """Tell whether a rank of this lane holds a declared parameter."""
        return fqn not in self.elsewhere

    def held_by(self, record: TensorRecord) -> tuple[int, ...]:
        """Return the ranks that hold a record."""
        return self.merged[record.seq].held_by

    def payload(self, record: TensorRecord) -> HostTensor:
        """Return the elements of a canonical record, put together from those of the ranks.

        Raises:
            DumpError: one of them has none, or its file does not fit.
        """
        found = self.merged[record.seq]
        if found.source is not None:
            rank, own = found.source
            return self.run.ranks[rank].payload(own)
        return assemble(self.run, found.shards, record.shape)


def assemble(run: Run, shards: Sequence[Shard], shape: tuple[int, ...]) -> HostTensor:
    """Return a canonical tensor from its shards' elements.

    Partial sums are added in float64, multiplied by their factor, and rounded once to the type of the shards.

    Args:
        run: the run that recorded them.
        shards: which together hold every element: once, or each a term of its sum.
        shape: canonical.

    Raises:
        DumpError: one of them has no elements, or its file does not fit.
    """
    pieces = [run.ranks[shard.rank].payload(shard.record) for shard in shards]
    size, dtype = int(np.prod(shape, dtype=np.int64)), pieces[0].dtype
    if all(exact(shard) for shard in shards):
        bits = np.empty(size, pieces[0].bits.dtype)
        for shard, piece in zip(shards, pieces, strict=True):
            bits[canonical_index(shard.part)] = piece.bits.reshape(-1)
        return HostTensor(bits=bits.reshape(shape), dtype=dtype)
    total = np.zeros(size)
    for shard, piece in zip(shards, pieces, strict=True):
        total[canonical_index(shard.part)] += to_numbers(piece).astype(np.float64).reshape(-1) * shard.factor
    return HostTensor(bits=to_bits(total.reshape(shape), dtype), dtype=dtype)


def held_alone(shards: Sequence[Shard]) -> list[Shard]:
    """Return the shards of one context-parallel rank as parts of what it has: its tokens, its terms of sums.

    Of each dimension that is the places which one of the shards has.
    """
    held: dict[int, NDArray[np.int64]] = {}
    for split in (split for shard in shards for split in shard.part.placement.splits):
        held[split.dim] = np.union1d(held.get(split.dim, np.empty(0, np.int64)), places_of(split))
    return [replace(shard, part=_within(shard.part, held)) for shard in shards]


def _within(part: Part, held: Mapping[int, NDArray[np.int64]]) -> Part:
    place = part.placement
    own = {split.dim: split for split in place.splits}
    shape = tuple(len(held[dim]) if dim in held else size for dim, size in enumerate(place.shape))
    splits = []
    for dim, places in sorted(held.items()):
        mine = places_of(own[dim]) if dim in own else np.arange(place.shape[dim])
        found = np.searchsorted(places, mine)
        starts = np.flatnonzero(np.diff(found, prepend=-2) != 1)
        lengths = np.diff(starts, append=len(found))
        blocks = zip(found[starts].tolist(), lengths.tolist(), strict=True)
        splits.append(Split(dim=dim, blocks=tuple(blocks)))
    whole = all(split.blocks == ((0, shape[split.dim]),) for split in splits)
    own_sum = without_sum(place, CONTEXT_GROUP)
    return replace(part, placement=replace(own_sum, shape=shape, splits=() if whole else tuple(splits)))


def exact(shard: Shard) -> bool:
    """Tell whether a shard's elements are the canonical tensor's, bit for bit."""
    return shard.factor == 1.0 and not shard.part.placement.partial and shard.term_of[1] == 1
