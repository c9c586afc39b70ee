"""Shards of canonical tensors, and the records and elements that they are put together to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump.reader import RankRecords, Run
from mindspeed_precision.record.elements import to_bits, to_numbers
from mindspeed_precision.record.placement import canonical_index
from mindspeed_precision.records import Part, RankCoordinates, TensorRecord


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
    """

    rank: int
    where: RankCoordinates
    record: TensorRecord
    part: Part
    factor: float = 1.0

    @property
    def place(self) -> tuple[object, ...]:
        """What replicas of one shard have in common."""
        return self.part.placement.splits, self.part.start, self.part.stop


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


def exact(shard: Shard) -> bool:
    """Tell whether a shard's elements are the canonical tensor's, bit for bit."""
    return shard.factor == 1.0 and not shard.part.placement.partial
