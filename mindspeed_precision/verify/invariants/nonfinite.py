"""NaN, infinities, and how far numbers are from there."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from mindspeed_precision.records import Finding, Phase, RecordKey, Role, Severity, TensorRecord
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.partial import Partial
from mindspeed_precision.verify.places import Found, in_execution_order, of_collective, seen_first, steps_text
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import each_rank

_BACKWARD = frozenset({Phase.DGRAD, Phase.WGRAD, Phase.ACCUMULATE, Phase.REDUCE, Phase.CLIP})
_OF_PARAMETERS = frozenset({Role.PARAM, Role.MASTER_PARAM, Role.EXP_AVG, Role.EXP_AVG_SQ})


@invariant(
    "nonfinite.first",
    holds="no number is NaN or infinite, but gradients of a step that fp16's loss scaling skips",
    unit="tensors",
    span=[each_rank()],
)
def first_nonfinite(facts: RunFacts) -> Answer:
    """Name the first tensor with NaN or Inf, in the order in which the whole model runs."""
    looked, found = 0, []
    excused = _skipped_steps(facts)
    for rank, records in facts.ranks.items():
        for record in (*records.records, *records.unfinished):
            statistics = record.digest.statistics
            if statistics is None or _is_mask(record):
                continue
            looked += 1
            if (statistics.nans or statistics.infs) and not (
                record.key.step in excused and record.key.phase in _BACKWARD
            ):
                text = f"{statistics.nans} NaN, {statistics.infs} Inf of {record.numel} elements"
                found.append(Found(rank=rank, record=record, text=text))
    skipped = "" if looked else "no statistics were recorded (capture.level=statistics)"
    if looked and _unknown_updates(facts):
        skipped = "infinite gradients of float16 are excused: whether steps were skipped was not recorded"
    if not found:
        return Answer(exercised=looked, skipped=skipped)
    ordered = in_execution_order(facts, found)
    first = ordered[0]
    ranks = sorted({one.rank for one in ordered if one.record.key == first.record.key})
    return Answer(
        exercised=looked,
        failed=len(found),
        findings=(seen_first(first, facts, _first(first, ranks, len(found)), count=len(found)),),
    )


def _first(first: Found, ranks: Sequence[int], count: int) -> Finding:
    key = first.record.key
    return Finding(
        id="nonfinite.first",
        severity=Severity.ERROR,
        confidence=0.95,
        title=f"the first NaN or Inf: {key.fqn or '(model)'} {key.role.value} in {key.phase.value}, "
        f"step {key.step}",
        evidence=(
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}, {key.describe()}: "
            f"{first.text}",
            "every record before it is finite",
            f"{count} records have NaN or Inf in all",
        ),
        remedy=_advice(key),
        where=key,
    )


def _advice(key: RecordKey) -> str:
    if key.role in _OF_PARAMETERS:
        return "the update before made it: look at the gradient, its norm, lr and epsilon of that step"
    if key.role in (Role.INPUT, Role.GRAD_OUTPUT):
        return "an operation between modules made it, which is not recorded: look at what gives this input"
    if key.role is Role.BGRAD:
        return "what was summed held it: look at the operation that the result of this module goes into"
    if key.role is Role.MAIN_GRAD and key.slot == "before":
        return "the buffer held it before anything was added: who clears it, and when"
    return "look at this operation: its inputs were finite (level tensor in capture.rules keeps them)"


def _is_mask(record: TensorRecord) -> bool:
    """Tell whether infinities are meant: an additive mask, or a buffer, which may hold one."""
    if record.key.role is Role.BUFFER:
        return record.digest.statistics is not None and not record.digest.statistics.nans
    return record.key.role in (Role.INPUT, Role.BATCH) and "mask" in record.key.slot


def _skipped_steps(facts: RunFacts) -> frozenset[int]:
    """Return the steps in which no rank's optimizer was seen to update, so that they may have been skipped.

    It was called and updated nothing, or it was not recorded, or the step did not end.
    """
    return facts.begun - facts.updated if facts.half else frozenset()


def _unknown_updates(facts: RunFacts) -> bool:
    """Tell whether skipped steps are not known: float16 was trained, and the optimizer not recorded."""
    return facts.half and not facts.kinds.get((Phase.OPTIMIZER, Role.PARAM))


LARGEST = {
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
    "float32": 3.4028234663852886e38,
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
}
"""Largest finite number, by type (IEEE 754; OCP 8-bit floating point specification)."""

_NEAR = {"float16": 8.0}
"""Within which factor of the largest number a value of narrow range is near it."""

_SQUARE = 64.0
"""Within which factor of where their square overflows float32 and bfloat16 are near it."""

_SCALED = frozenset({"float8_e4m3fn", "float8_e5m2"})
"""Types whose values are scaled to fill their range."""


def _limit(dtype: str) -> float | None:
    """Return beyond which size numbers of a type are in danger; None: there is none."""
    if dtype not in LARGEST or dtype in _SCALED:
        return None
    return LARGEST[dtype] / _NEAR[dtype] if dtype in _NEAR else math.sqrt(LARGEST[dtype]) / _SQUARE


_NEAR_IT = "is near"


def _growing_where_none_is_near(
    findings: Sequence[Partial], exercised: int, failed: int
) -> tuple[Sequence[Partial], int]:
    near = [one for one in findings if one.kind == _NEAR_IT]
    return (near, sum(one.count for one in near)) if near else (findings, failed)


@invariant(
    "nonfinite.near_overflow",
    holds="activations, parameters and gradients are far from the largest number of their type, and stay so",
    unit="tensors",
    span=[each_rank()],
    settle=_growing_where_none_is_near,
)
def near_overflow(facts: RunFacts) -> Answer:
    """Find numbers that are near the largest one of their type, or will be if they grow on as they do."""
    looked, near = 0, []
    sizes: dict[tuple[int, Phase, str, Role, str], dict[int, tuple[float, TensorRecord]]] = defaultdict(dict)
    for rank, records in facts.ranks.items():
        for record in records.records:
            size, limit = _size(record), _limit(record.dtype)
            if size is None or limit is None or record.key.step < 0:
                continue
            looked += 1
            if size >= limit:
                near.append(Found(rank=rank, record=record, text=_distance(record, size), number=size))
            key = record.key
            place = rank, key.phase, key.fqn, key.role, key.slot
            if size > sizes[place].get(key.step, (-1.0, record))[0]:
                sizes[place][key.step] = size, record
    growing = [found for place, steps in sizes.items() if (found := _growing(place[0], steps))]
    findings = [
        _overflow(facts, found, what)
        for found, what in ((near, _NEAR_IT), (growing, "grows towards"))
        if found
    ]
    skipped = "" if looked else "no statistics were recorded (capture.level=statistics)"
    return Answer(
        exercised=looked, failed=len(near) + len(growing), findings=tuple(findings), skipped=skipped
    )


def _size(record: TensorRecord) -> float | None:
    """Return the largest absolute value; None where that says nothing: gradients that fp16 scales up."""
    statistics = record.digest.statistics
    if statistics is None or of_collective(record) or _is_mask(record):
        return None
    if record.dtype == "float16" and record.key.phase in _BACKWARD:
        return None
    size = max(abs(statistics.minimum), abs(statistics.maximum))
    return size if math.isfinite(size) else None


def _distance(record: TensorRecord, size: float) -> str:
    return f"largest absolute value {size:.4g}; {record.dtype} ends at {LARGEST[record.dtype]:.4g}"


_GROWTH = 2.0
_STEPS = 4


def _growing(rank: int, steps: dict[int, tuple[float, TensorRecord]]) -> Found | None:
    """Return a tensor that doubles with every step and is in danger after as many as were recorded."""
    values = [steps[step] for step in sorted(steps)]
    if len(values) < _STEPS or min(size for size, _ in values) <= 0:
        return None
    factors = [two[0] / one[0] for one, two in pairwise(values)]
    size, record = values[-1]
    limit = _limit(record.dtype)
    if limit is None or min(factors) < _GROWTH or size * min(factors) ** len(values) < limit:
        return None
    text = f"{_distance(record, size)}; times {min(factors):.3g} or more with every step"
    return Found(rank=rank, record=record, text=text, number=size)


def _overflow(facts: RunFacts, found: Sequence[Found], what: str) -> Partial:
    first, largest = in_execution_order(facts, found)[0], max(found, key=lambda one: one.number)
    key = first.record.key
    finding = Finding(
        id="nonfinite.near_overflow",
        severity=Severity.WARNING,
        confidence=0.7,
        title=f"{key.fqn or '(model)'} {key.role.value} {what} the largest number of its type",
        evidence=(
            f"first: rank {first.rank}, {key.describe()}: {first.text}",
            f"largest: rank {largest.rank}, {largest.record.key.describe()}: {largest.text}",
            f"{len(found)} records, {steps_text(one.record.key.step for one in found)}",
        ),
        remedy="use bfloat16 or float32 there, a smaller learning rate, or look at what makes it grow",
        where=key,
    )
    return seen_first(first, facts, finding, count=len(found), kind=what)
