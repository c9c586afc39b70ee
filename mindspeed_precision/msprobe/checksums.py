"""Checksums that msprobe took too late, told from those that differ.

On a CPU msprobe computes a CRC in another thread, of memory that training goes on writing into: an operation
in place behind it changes what is summed. Two dumps of one training then differ in some checksums, while the
numbers that were taken in time (Max, Min, Mean, Norm) agree to the last digit, and so does all that was
computed from those tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mindspeed_precision.dump.reader import RankRecords, Run
from mindspeed_precision.records import Phase, RecordKey, TensorRecord

_END = 0.05
"""Share of a step's records that are its end."""

_LEAST = 8
"""Records that are its end at the least."""

_AGREE = 0.9
"""Share of the end that has equal checksums where what was computed before it is the same."""

_Pairs = Mapping[RecordKey, tuple[TensorRecord, TensorRecord]]


def without_raced(baseline: Run, candidate: Run) -> tuple[Run, Run]:
    """Return two dumps without the checksums that were taken too late, which a note counts.

    A checksum that differs is dropped where Max, Min, Mean and Norm are equal and what comes of the tensor
    is: the end of the step, or of a sum of gradients the next one. It is then judged by the four numbers.
    """
    ranks = {number: baseline.ranks[number] for number in baseline.ranks.keys() & candidate.ranks.keys()}
    dropped = {number: _raced(rank, candidate.ranks[number]) for number, rank in ranks.items()}
    count = sum(map(len, dropped.values()))
    if not count:
        return baseline, candidate
    note = (
        f"{count} checksums differ from the other dump's although Max, Min, Mean and Norm are equal to the "
        "last digit and what was computed from them agrees: msprobe takes a CRC on a CPU while the memory is "
        "written to; judged by the four numbers"
    )
    return _without(baseline, dropped, note), _without(candidate, dropped, "")


def _without(run: Run, dropped: Mapping[int, frozenset[RecordKey]], note: str) -> Run:
    ranks = {
        number: replace(
            rank, records=tuple(_plain(r, dropped.get(number, frozenset())) for r in rank.records)
        )
        for number, rank in run.ranks.items()
    }
    return replace(run, ranks=ranks, notes=(*run.notes, note) if note else run.notes)


def _plain(record: TensorRecord, dropped: frozenset[RecordKey]) -> TensorRecord:
    if record.key not in dropped or record.summary is None:
        return record
    return replace(record, summary=replace(record.summary, checksum="", algorithm=""))


def _raced(one: RankRecords, two: RankRecords) -> frozenset[RecordKey]:
    others = {record.key: record for record in two.records}
    pairs = {
        r.key: (r, others[r.key]) for r in one.records if r.key in others and _comparable(r, others[r.key])
    }
    suspected = [key for key, pair in pairs.items() if not _same(pair) and _numbers_equal(pair)]
    if not suspected:
        return frozenset()
    ends = {step: _end_agrees(step, pairs) for step in {key.step for key in pairs}}
    later = _later(pairs)
    return frozenset(key for key in suspected if (later[key] if key in later else ends[key.step]))


def _comparable(one: TensorRecord, two: TensorRecord) -> bool:
    a, b = one.summary, two.summary
    return a is not None and b is not None and bool(a.checksum) and a.algorithm == b.algorithm


def _same(pair: tuple[TensorRecord, TensorRecord]) -> bool:
    one, two = pair[0].summary, pair[1].summary
    return one is not None and two is not None and one.checksum == two.checksum


def _numbers_equal(pair: tuple[TensorRecord, TensorRecord]) -> bool:
    one, two = (record.summary for record in pair)
    if one is None or two is None or one.maximum is None or two.maximum is None:
        return False
    return replace(one, checksum="") == replace(two, checksum="")


def _end_agrees(step: int, pairs: _Pairs) -> bool:
    """Tell whether what a step ends in has equal checksums: what it was computed from then has, too.

    That is the parameters that it leaves; of the last step of a dump the sums of gradients; where there are
    none, its last records.
    """
    of_step = {key: pair for key, pair in pairs.items() if key.step == step}
    kinds = [
        [p for key, p in of_step.items() if key.phase is ph] for ph in (Phase.OPTIMIZER, Phase.ACCUMULATE)
    ]
    end = next(filter(None, kinds), list(of_step.values())[-max(_LEAST, int(_END * len(of_step))) :])
    equal = sum(map(_same, end))
    return equal >= _AGREE * len(end) and all(_same(pair) or _numbers_equal(pair) for pair in end)


def _later(pairs: _Pairs) -> dict[RecordKey, bool]:
    """Tell of each sum of gradients whether the next one of its parameter, or the parameter, is equal.

    Nothing else of a step is computed from it, so that the end of the step says nothing of it.
    """
    found: dict[RecordKey, bool] = {}
    for key in pairs:
        if key.phase in (Phase.ACCUMULATE, Phase.WGRAD):
            after = (
                _same(pair)
                for other, pair in pairs.items()
                if other.fqn == key.fqn
                and (other.step, other.microbatch) > (key.step, key.microbatch)
                and other.phase is key.phase
            )
            found[key] = next(after, False)
    return found
