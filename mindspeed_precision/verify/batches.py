"""What each data-parallel lane read, microbatch by microbatch, in the order of training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_precision.record.elements import to_numbers
from mindspeed_precision.records import NO_MICROBATCH, Phase, Role, TensorRecord
from mindspeed_precision.verify.run_facts import RunFacts

SAMPLE_IDS = "sample_ids"
_CONTENT = ("tokens", "input_ids", "text", "pixel_values", "images", "inputs")
"""Names of what a batch is about, best first; masks and positions are alike in many batches."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one data-parallel rank read in one microbatch.

    Attributes:
        step: of training.
        microbatch: of the step.
        lane: the data-parallel rank.
        rank: a rank of the lane that recorded it.
        record: of its content.
        bits: fingerprint and shape: equal for equal content.
        ids: the samples, where they are known; else empty.
        ids_record: their record.
    """

    step: int
    microbatch: int
    lane: int
    rank: int
    record: TensorRecord
    bits: tuple[object, ...]
    ids: tuple[int, ...]
    ids_record: TensorRecord | None

    @property
    def place(self) -> str:
        """Where it was read, for a person."""
        return f"step {self.step}, microbatch {self.microbatch}, data-parallel rank {self.lane}"


def batches(facts: RunFacts) -> list[Batch]:
    """Return what every lane read, in the order of training: by step, microbatch and lane."""
    found: dict[tuple[int, int, int], Batch] = {}
    for rank, records in facts.ranks.items():
        held: dict[tuple[int, int], dict[str, TensorRecord]] = defaultdict(dict)
        for record in facts.of(rank, Phase.BATCH, Role.BATCH):
            if record.key.microbatch != NO_MICROBATCH and record.key.step >= 0:
                held[record.key.step, record.key.microbatch].setdefault(record.key.slot, record)
        for (step, microbatch), slots in held.items():
            content, lane = _content(slots), records.coordinates.dp_rank
            if content is not None:
                ids = slots.get(SAMPLE_IDS)
                found.setdefault(
                    (step, microbatch, lane),
                    Batch(
                        step=step,
                        microbatch=microbatch,
                        lane=lane,
                        rank=rank,
                        record=content,
                        bits=(content.digest.fingerprint, content.shape, content.dtype),
                        ids=() if ids is None else _ids(facts, rank, ids),
                        ids_record=ids,
                    ),
                )
    return [found[place] for place in sorted(found)]


def read_first(facts: RunFacts) -> Iterator[tuple[int, TensorRecord]]:
    """Yield the records that ``batches`` is made of."""
    for batch in batches(facts):
        yield batch.rank, batch.record
        if batch.ids_record is not None:
            yield batch.rank, batch.ids_record


def _content(slots: Mapping[str, TensorRecord]) -> TensorRecord | None:
    """Return the record that tells batches apart best; None where each is one number, or nothing."""
    for name in _CONTENT:
        for slot, record in slots.items():
            if slot.rpartition(".")[2] == name and _tells(record):
                return record
    return None


def _tells(record: TensorRecord) -> bool:
    """Tell whether a record may differ between batches: not a constant, nor a single number."""
    statistics = record.digest.statistics
    return record.numel > 1 and (statistics is None or statistics.minimum != statistics.maximum)


def _ids(facts: RunFacts, rank: int, record: TensorRecord) -> tuple[int, ...]:
    """Return sample ids, from the elements, or from moments that only a range or two numbers have."""
    elements = facts.payload(rank, record)
    if elements is not None:
        return tuple(int(number) for number in np.asarray(to_numbers(elements)).reshape(-1))
    statistics = record.digest.statistics
    if statistics is None:
        return ()
    first, last, count = int(statistics.minimum), int(statistics.maximum), record.numel
    if count <= 2:
        return (first, last)[:count]
    wanted = np.arange(first, first + count, dtype=np.float64)
    alike = np.allclose(
        [statistics.mean, statistics.l2_norm], [wanted.mean(), np.linalg.norm(wanted)], rtol=1e-12, atol=0
    )
    return tuple(range(first, last + 1)) if last - first == count - 1 and alike else ()


def epoch_ends(identities: Sequence[object]) -> int | None:
    """Return where a stream begins anew; None where what repeats is no new epoch.

    A stream that begins anew repeats what it had and has nothing new afterwards. Where something new follows
    a repetition, that repetition was none of an epoch.

    Args:
        identities: what was read, in order.
    """
    seen: set[object] = set()
    for position, identity in enumerate(identities):
        if identity in seen:
            return position if set(identities[position:]) <= seen else None
        seen.add(identity)
    return None
