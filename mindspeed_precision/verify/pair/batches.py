"""The batches of two runs, microbatch by microbatch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.records import Phase, RecordKey, Role, Side, TensorRecord
from mindspeed_precision.verify.pair_facts import PairFacts

CONTENT = ("tokens", "input_ids", "text", "inputs", "images", "pixel_values", "0")
"""Slots that hold what a sample is, in the order in which they are looked for; others say how to read it."""

SAMPLE_IDS = "sample_ids"
_MASK64 = (1 << 64) - 1

Place = tuple[int, int, int, int, int]
"""Step, data-parallel rank, context-parallel rank, microbatch, nth batch of the microbatch."""


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """What one data-parallel rank took from its iterator once.

    Attributes:
        slots: records by slot.
        rank: that recorded them.
        run: whose they are.
    """

    slots: Mapping[str, TensorRecord]
    rank: int
    run: Run

    @cached_property
    def content_slot(self) -> str:
        """The slot that holds what the samples are; empty where none is known."""
        return next((name for name in CONTENT if name in self.slots), "")

    def fingerprint(self, slot: str) -> int | None:
        """Return the fingerprint of a slot; None: there is no such slot."""
        record = self.slots.get(slot)
        return None if record is None else record.digest.fingerprint

    @property
    def content(self) -> TensorRecord | None:
        """What the samples are."""
        return self.slots.get(self.content_slot)

    def elements(self, slot: str) -> HostTensor | None:
        """Return the elements of a slot, or None where none were kept."""
        record = self.slots.get(slot)
        if record is None or record.payload is None:
            return None
        return self.run.ranks[self.rank].payload(record)


def batches_of(run: Run, steps: Iterable[int]) -> dict[Place, Microbatch]:
    """Return the batches of some steps, in order; of ranks that share a batch the first that recorded it."""
    wanted = set(steps)
    slots: dict[Place, dict[str, TensorRecord]] = defaultdict(dict)
    ranks: dict[Place, int] = {}
    for number, rank in run.ranks.items():
        for record in rank.records:
            key = record.key
            if key.phase is not Phase.BATCH or key.role is not Role.BATCH or key.step not in wanted:
                continue
            here = rank.coordinates
            place = (key.step, here.dp_rank, here.cp_rank, key.microbatch, key.occurrence)
            if ranks.setdefault(place, number) == number:
                slots[place][key.slot] = record
    kept = [place for place in sorted(slots) if not _is_copy(slots, place)]
    return {place: Microbatch(slots=slots[place], rank=ranks[place], run=run) for place in kept}


def _is_copy(slots: Mapping[Place, Mapping[str, TensorRecord]], place: Place) -> bool:
    """Tell whether a context-parallel rank took the whole samples that the first one took, too.

    Megatron cuts a batch over these ranks after it was taken from the iterator.
    """
    step, dp, cp, microbatch, occurrence = place
    first = slots.get((step, dp, 0, microbatch, occurrence)) if cp else None
    own = slots[place]
    return (
        first is not None
        and first.keys() == own.keys()
        and all(first[name].digest.same_bits(own[name].digest) for name in own)
    )


@dataclass(frozen=True, kw_only=True)
class BatchPair:
    """The batches of two runs in the steps that both have."""

    baseline: Mapping[Place, Microbatch]
    candidate: Mapping[Place, Microbatch]

    @property
    def places(self) -> list[Place]:
        """The places that both runs have, in order."""
        return [place for place in self.baseline if place in self.candidate]

    @property
    def alike(self) -> bool:
        """Whether both runs have the same places, and samples of the same shapes in them."""
        return self.baseline.keys() == self.candidate.keys() and all(
            _shape(self.baseline[place]) == _shape(self.candidate[place]) for place in self.baseline
        )

    def differing(self) -> dict[Place, list[str]]:
        """Return by place the slots that both runs have and that differ."""
        found = {}
        for place in self.places:
            one, two = self.baseline[place].slots, self.candidate[place].slots
            apart = [slot for slot in one if slot in two and not one[slot].digest.same_bits(two[slot].digest)]
            if apart:
                found[place] = apart
        return found

    def sums(self, slot: str, step: int | None = None) -> tuple[int, int]:
        """Return sums of unordered fingerprints of a slot: equal for the same elements in any order."""
        one, two = (
            sum(
                batch.slots[slot].digest.unordered
                for place, batch in side.items()
                if slot in batch.slots and step in (None, place[0])
            )
            & _MASK64
            for side in (self.baseline, self.candidate)
        )
        return one, two

    def size(self, slot: str, step: int) -> tuple[int, int]:
        """Return how many elements of a slot each run has in a step."""
        one, two = (
            sum(b.slots[slot].numel for place, b in side.items() if place[0] == step and slot in b.slots)
            for side in (self.baseline, self.candidate)
        )
        return one, two


def _shape(batch: Microbatch) -> tuple[int, ...] | None:
    return None if batch.content is None else batch.content.shape


def batch_pair(facts: PairFacts) -> BatchPair:
    """Return the batches of both runs in their common steps."""
    return BatchPair(
        baseline=batches_of(facts.run(Side.BASELINE), facts.steps),
        candidate=batches_of(facts.run(Side.CANDIDATE), facts.steps),
    )


def same_batches(facts: PairFacts) -> bool | None:
    """Tell whether the batches of all common steps are the same; None: they were not recorded."""
    pair = batch_pair(facts)
    if not pair.baseline or not pair.candidate:
        return None
    if pair.alike:
        return not pair.differing()
    slot = next(iter(pair.baseline.values())).content_slot
    return bool(slot) and all(one == two for one, two in (pair.sums(slot, step) for step in facts.steps))


def key_of(place: Place, slot: str) -> RecordKey:
    """Return the key of a batch's record."""
    step, _, _, microbatch, occurrence = place
    return RecordKey(
        step=step,
        microbatch=microbatch,
        phase=Phase.BATCH,
        fqn="batch",
        role=Role.BATCH,
        slot=slot,
        occurrence=occurrence,
    )
