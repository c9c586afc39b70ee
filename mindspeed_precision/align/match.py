"""Match the records of two runs of the same parallel layout, rank by rank, on their keys."""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mindspeed_precision.align.compatible import (
    common_ranks,
    common_steps,
    require_same_layout,
    require_same_model,
)
from mindspeed_precision.align.start import common_start, initial
from mindspeed_precision.dump.reader import RankRecords, Run
from mindspeed_precision.records import Pair, RecordKey, Side, TensorRecord, Unmatched

CLOSEST = 3
"""How many candidates an unmatched record is shown with."""

_NAMED_CLOSEST = 200
"""For so many unmatched records closest candidates are searched: beyond, the cause is not a misspelt name."""


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """What belongs together.

    Attributes:
        ranks: compared ranks, ascending.
        steps: compared training steps, ascending.
        pairs: by rank, then in the baseline's execution order.
        unmatched: records of a compared step and rank that have no partner.
        notes: what was left out, and why.
    """

    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    pairs: tuple[Pair, ...]
    unmatched: tuple[Unmatched, ...]
    notes: tuple[str, ...]


def align(baseline: Run, candidate: Run) -> Alignment:
    """Pair the records of two runs.

    Only steps that are whole on all ranks of both runs are compared. Records of recomputed activations that
    one run alone has are no loss: recomputation is a setting. The runs may keep different levels of detail.

    Raises:
        IncomparableError: the parallel layouts or the models differ, or no rank or step is common.
    """
    require_same_layout(baseline, candidate)
    ranks, notes = common_ranks(baseline, candidate)
    require_same_model(baseline, candidate, ranks)
    steps, step_notes = common_steps(baseline, candidate, ranks)
    start = common_start(baseline, candidate, ranks)
    pairs: list[Pair] = []
    unmatched: list[Unmatched] = []
    recomputed: Counter[Side] = Counter()
    for rank in ranks:
        notes += _repeated(baseline.ranks[rank], candidate.ranks[rank])
        one = _by_key(baseline.ranks[rank], steps, start.baseline)
        two = _by_key(candidate.ranks[rank], steps, start.candidate)
        pairs += _pairs(rank, one, two)
        for side, mine, other in ((Side.BASELINE, one, two), (Side.CANDIDATE, two, one)):
            alone = [record for key, record in mine.items() if key not in other]
            recomputed[side] += sum(record.key.recomputed for record in alone)
            rest = [record for record in alone if not record.key.recomputed]
            unmatched += _unmatched(side, rank, rest, other)
    notes += [*step_notes, *filter(None, [start.note])]
    notes += [
        f"only the {side.value} recomputes activations: {count} recomputed records not compared"
        for side, count in recomputed.items()
        if count
    ]
    return Alignment(
        ranks=tuple(ranks),
        steps=tuple(steps),
        pairs=tuple(pairs),
        unmatched=tuple(unmatched),
        notes=tuple(notes),
    )


def _by_key(rank: RankRecords, steps: Sequence[int], start: int | None) -> dict[RecordKey, TensorRecord]:
    wanted = set(steps)
    ordered = sorted((r for r in rank.records if r.key.step in wanted), key=lambda record: record.seq)
    return {record.key: record for record in (*initial(rank, start), *ordered)}


def _repeated(baseline: RankRecords, candidate: RankRecords) -> list[str]:
    """Say where a key names several records: only the last one can be compared."""
    notes = []
    for side, rank in ((Side.BASELINE, baseline), (Side.CANDIDATE, candidate)):
        keys = Counter(record.key for record in rank.records)
        twice = [key for key, count in keys.items() if count > 1]
        if twice:
            notes.append(
                f"{len(twice)} keys occur more than once on rank {rank.coordinates.rank} of the "
                f"{side.value}, "
                f"only their last record is compared: {twice[0].describe()}"
            )
    return notes


def _pairs(
    rank: int, one: dict[RecordKey, TensorRecord], two: dict[RecordKey, TensorRecord]
) -> Iterable[Pair]:
    return [Pair(rank=rank, baseline=record, candidate=two[key]) for key, record in one.items() if key in two]


def _unmatched(
    side: Side, rank: int, alone: Sequence[TensorRecord], other: dict[RecordKey, TensorRecord]
) -> list[Unmatched]:
    """Name records without a partner, each with the keys of the other run that resemble it."""
    by_moment: dict[tuple[object, ...], list[RecordKey]] = defaultdict(list)
    if len(alone) <= _NAMED_CLOSEST:
        for key in other:
            by_moment[_moment(key)].append(key)
    return [
        Unmatched(
            side=side, rank=rank, record=record, closest=_closest(record.key, by_moment[_moment(record.key)])
        )
        for record in alone
    ]


def _moment(key: RecordKey) -> tuple[object, ...]:
    return key.step, key.microbatch, key.phase


def _closest(key: RecordKey, others: Sequence[RecordKey]) -> tuple[RecordKey, ...]:
    """Return up to ``CLOSEST`` keys of the same moment, same role first, then by likeness of the fqn."""
    names = difflib.get_close_matches(
        key.fqn, sorted({other.fqn for other in others}), n=2 * CLOSEST, cutoff=0.6
    )
    likeness = {name: position for position, name in enumerate(names)}
    near = [other for other in others if other.fqn in likeness]
    near.sort(key=lambda other: (other.role != key.role, likeness[other.fqn], other.slot != key.slot))
    return tuple(near[:CLOSEST])
