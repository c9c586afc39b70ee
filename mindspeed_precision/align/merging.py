"""Records of several ranks, merged to those of one canonical tensor: shards, replicas and partial sums."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from mindspeed_precision.align.shards import Merged, Shard, exact
from mindspeed_precision.align.stages import Stages
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.record.merge import merge_digests, scale_digest, sum_digests
from mindspeed_precision.records import (
    NO_MICROBATCH,
    Digest,
    Phase,
    RecordKey,
    ReplicasDiffer,
    Side,
    TensorRecord,
)

BEFORE_REDUCTION = frozenset({Phase.WGRAD, Phase.ACCUMULATE})
"""Phases of which each rank has its own part of the batch."""

_IN_MICROBATCH = frozenset({Phase.INIT, Phase.BATCH, Phase.FPROP, Phase.LOSS, Phase.DGRAD, *BEFORE_REDUCTION})


class Merger:
    """Merges the records of one run.

    Args:
        run: the run.
        stages: the parts of its model.

    Attributes:
        unruled: keys of records that could not be merged, with the reason.
        replicas: copies that differ, with the place of the record in the execution.
        compared: how many tensors were found to have several copies.
    """

    def __init__(self, run: Run, stages: Stages) -> None:
        self._run = run
        self._stages = stages
        self.unruled: dict[RecordKey, str] = {}
        self.replicas: list[tuple[tuple[object, ...], ReplicasDiffer]] = []
        self.compared = 0

    def merge(self, key: RecordKey, shards: Sequence[Shard], *, copies: bool = False) -> Merged:
        """Return the canonical record of a key.

        Args:
            key: canonical.
            shards: what the ranks hold of it, replicas among them.
            copies: keep replicas that differ as records of their own.
        """
        terms = self.compare(key, shards)
        shape = shards[0].part.placement.shape
        reason = _problem(terms, shape)
        if reason:
            self.unruled.setdefault(key, reason)
            return self.single(key, [(shard.rank, shard.record) for shard in shards])
        chosen = tuple(shard for found in terms for shard in found)
        if copies and len(terms) == 1 and exact(chosen[0]):
            first, *others = self._copies(key, shards)
            return replace(first, copies=tuple(others))
        return self._merged(key, chosen, [len(found) for found in terms], shards)

    def compare(self, key: RecordKey, shards: Sequence[Shard]) -> list[list[Shard]]:
        """Compare the replicas of each shard; return one of each, by place: terms of its sum, or itself."""
        places: dict[tuple[object, ...], list[Shard]] = defaultdict(list)
        for shard in shards:
            places[shard.place].append(shard)
        return [self._terms(key, members) for members in places.values()]

    def _merged(
        self, key: RecordKey, chosen: tuple[Shard, ...], terms: Sequence[int], held: Sequence[Shard]
    ) -> Merged:
        shape, first = chosen[0].part.placement.shape, chosen[0].record
        ranks = tuple(sorted({shard.rank for shard in held}))
        order = self.order(chosen[0].rank, replace(first, key=key))
        whole = replace(first, key=key, shape=shape, part=None, place=None)
        if len(chosen) == 1 and exact(chosen[0]):
            source = (chosen[0].rank, first)
            # a range of a distributed optimizer is flat on the rank, and is read as that
            if first.shape == shape:
                return Merged(order=order, record=whole, source=source, held_by=ranks)
        record = replace(
            whole,
            layout=None,
            digest=_digest(chosen, terms),
            payload="shards" if all(shard.record.payload for shard in chosen) else None,
        )
        return Merged(order=order, record=record, shards=chosen, held_by=ranks)

    def _terms(self, key: RecordKey, members: Sequence[Shard]) -> list[Shard]:
        """Return one rank's shard of each term of a sum, of one place; replicas of a term are checked."""
        terms: dict[int, list[Shard]] = defaultdict(list)
        for shard in members:
            terms[shard.term_of[0]].append(shard)
        for replicas in terms.values():
            self.check_replicas(key, [(shard.rank, shard.record) for shard in replicas])
        return [replicas[0] for replicas in terms.values()]

    def _copies(self, key: RecordKey, shards: Sequence[Shard]) -> list[Merged]:
        """Return what the ranks hold that should all be the same: one of each kind."""
        by_bits: dict[int, list[Shard]] = defaultdict(list)
        for shard in shards:
            by_bits[shard.record.digest.fingerprint].append(shard)
        return [self._merged(key, (held[0],), [1], held) for held in by_bits.values()]

    def single(self, key: RecordKey, held: Sequence[tuple[int, TensorRecord]]) -> Merged:
        """Let the first rank stand for all that have a record."""
        rank, record = held[0]
        return Merged(
            order=self.order(rank, record),
            record=replace(record, key=key, part=None),
            source=(rank, record),
            held_by=tuple(sorted({number for number, _ in held})),
        )

    def order(self, rank: int, record: TensorRecord) -> tuple[object, ...]:
        """Place a record in the execution of the whole model."""
        return execution_order(self._stages, rank, record)

    def check_replicas(self, key: RecordKey, held: Sequence[tuple[int, TensorRecord]]) -> None:
        """Note it where ranks hold copies that are none."""
        self.compared += len(held) > 1
        by_bits: dict[int, list[int]] = defaultdict(list)
        for rank, record in held:
            by_bits[record.digest.fingerprint].append(rank)
        if len(by_bits) > 1:
            ranks = tuple(tuple(sorted(group)) for group in by_bits.values())
            found = ReplicasDiffer(key=key, side=Side.BASELINE, ranks=ranks)
            self.replicas.append((self.order(*held[0]), found))


def execution_order(stages: Stages, rank: int, record: TensorRecord) -> tuple[object, ...]:
    """Place a record in the execution of the whole model: forward through its parts, then backward."""
    key = record.key
    of_step = key.microbatch == NO_MICROBATCH and key.phase in (Phase.LOSS, Phase.WGRAD)
    late = of_step or key.phase not in _IN_MICROBATCH
    forward = late or key.phase not in (Phase.DGRAD, *BEFORE_REDUCTION)
    chunk, stage = (0, 0) if late else stages.part(rank, key)
    depth = (chunk, stage) if forward else (-chunk, -stage)
    return key.step, late, key.microbatch, not forward, depth, record.seq


def _problem(terms: Sequence[Sequence[Shard]], shape: tuple[int, ...]) -> str:
    """Say why shards do not make a tensor; empty where they do."""
    first = terms[0][0]
    every = [shard for found in terms for shard in found]
    if any(shard.part.placement.shape != shape for shard in every):
        return "its ranks do not agree on the shape of the whole"
    if any(shard.record.dtype != terms[0][0].record.dtype for shard in every):
        return "its ranks hold it in several types"
    held = sum(found[0].record.numel for found in terms)
    expected = first.term_of[1]
    if held != math.prod(shape) or any(len(found) != expected for found in terms):
        return "not every rank that holds a part of it recorded it"
    summed = first.part.placement.partial or ("a step" if first.term else "")
    if summed and not all(s.record.digest.sketch or s.record.payload for s in every):
        return f"a sum over {summed}: fingerprints do not add up to those of a sum (capture.level=sketch)"
    if summed and not all(s.record.payload for s in every) and not all(s.record.digest.finite for s in every):
        return f"a sum over {summed}: sketches leave out what is not finite (capture.level=tensor)"
    return ""


def _digest(chosen: Sequence[Shard], terms: Sequence[int]) -> Digest:
    """Return the digest of the whole: terms of one place are added, places are put together."""
    digests, sizes, start = [], [], 0
    for count in terms:
        members = chosen[start : start + count]
        own = [scale_digest(shard.record.digest, shard.factor) for shard in members]
        digests.append(own[0] if count == 1 else sum_digests(own))
        sizes.append(members[0].record.numel)
        start += count
    return digests[0] if len(digests) == 1 else merge_digests(digests, sizes)
