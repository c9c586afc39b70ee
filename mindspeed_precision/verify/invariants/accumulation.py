"""``main_grad`` after an accumulation is ``main_grad`` before plus dW, bit for bit in its own dtype."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.record.elements import to_bits, to_numbers
from mindspeed_precision.records import Phase, Role, TensorRecord
from mindspeed_precision.verify.elements import is_finite, moments_of, rounded, roundoff, sketch_of
from mindspeed_precision.verify.failures import Failure, failure, findings_of
from mindspeed_precision.verify.gradients import Accumulation, accumulations
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import each_rank

_SAMPLED = 1.22
"""A sketch of an error is at most so much longer than the error, but for a chance of 1e-6 (ADR 6)."""

_MOMENTS = 2.0**-18
"""Relative error of a mean and a norm that a device summed in float32."""

SUM = "sum"
"""Slot of what ``capture.verify_sums`` counted while training: elements that are not the sum."""


@invariant(
    "accumulate.not_the_sum",
    holds="main_grad after an accumulation is main_grad before plus dW, in the dtype of main_grad",
    unit="accumulations",
    span=[each_rank()],
)
def accumulation_is_a_sum(facts: RunFacts) -> Answer:
    """Add anew: from elements bit for bit; else what was counted live; else sketches, else means."""
    failures: list[Failure] = []
    ways: dict[str, int] = {}
    total = 0
    for number, rank in facts.ranks.items():
        counted = _counted_live(facts, number)
        for one in accumulations(rank):
            if one.added is None or one.after is None:
                continue
            total += 1
            live = counted.get((one.step, one.microbatch, one.fqn))
            way, found, kind = _judge(facts, number, one, live)
            ways[way] = ways.get(way, 0) + 1
            if found:
                failures.append(failure(one.after, number, found, kind))
    skipped = ways.pop("", 0)
    weak = [f"{count} by {way} alone" for way, count in ways.items() if way in (_SKETCHES, _MEANS)]
    if skipped:
        weak.append(f"{skipped} without statistics or elements (capture.verify_sums, or level tensor)")
    return Answer(
        exercised=sum(ways.values()),
        findings=findings_of(
            failures,
            id="accumulate.not_the_sum",
            title="main_grad after an accumulation is not main_grad before plus dW",
            remedy="who adds dW to main_grad, and in which dtype? A fused kernel that was called twice, "
            "a dW that was rounded first, and a buffer of another dtype show here",
        ),
        failed=len(failures),
        skipped="; ".join(weak) if total else "no accumulation was recorded with dW (capture.wgrad)",
    )


_ELEMENTS, _LIVE, _SKETCHES, _MEANS = "elements", "live count", "sketches", "means"


def _counted_live(facts: RunFacts, rank: int) -> dict[tuple[int, int, str], float]:
    return {
        (r.key.step, r.key.microbatch, r.key.fqn): r.value
        for r in facts.of(rank, Phase.ACCUMULATE, Role.RESIDUAL, slot=SUM)
        if r.value is not None
    }


def _judge(facts: RunFacts, rank: int, one: Accumulation, live: float | None) -> tuple[str, str, str]:
    """Return by which means an accumulation was judged (empty: by none), what is wrong, and its kind."""
    assert one.added is not None
    assert one.after is not None
    if one.after.payload and one.added.payload and (one.before is None or one.before.payload):
        return (_ELEMENTS, *_by_elements(facts, rank, one))
    if live is not None:
        wrong = f"{live:.0f} of {one.after.numel} elements are not the sum (counted while training)"
        return _LIVE, wrong if live else "", ""
    if not all(is_finite(record) for record in (one.added, one.after)):
        return "", "", ""
    found = _by_sketches(one)
    if found is not None:
        return _SKETCHES, found, ""
    found = _by_means(one)
    return ("", "", "") if found is None else (_MEANS, found, "")


def _by_elements(facts: RunFacts, rank: int, one: Accumulation) -> tuple[str, str]:
    ranked = facts.ranks[rank]
    assert one.added is not None
    assert one.after is not None
    added, after = (to_numbers(ranked.payload(record)) for record in (one.added, one.after))
    before = np.zeros_like(after) if one.before is None else to_numbers(ranked.payload(one.before))
    if after.shape != added.shape:
        return f"main_grad is {list(after.shape)}, dW {list(added.shape)}", "shapes differ"
    expected = added if one.before is None else total(before, added, one.after.dtype)
    wrong = (expected != after) & ~(np.isnan(expected) & np.isnan(after))
    if not wrong.any():
        return "", ""
    given, got = added.astype(np.float64), after.astype(np.float64) - before.astype(np.float64)
    return f"{int(wrong.sum())} of {after.size} elements differ", _explained(given, got, one.after.dtype)


def total(before: NDArray[np.generic], added: NDArray[np.generic], dtype: str) -> NDArray[np.generic]:
    """Return ``before + added`` rounded to a dtype, as numbers; of 16 bits it is exact in float32.

    Args:
        before: ``[...]`` numbers of ``dtype``, as ``record.elements.to_numbers`` gives them.
        added: ``[...]`` of any floating type, which is first widened.
        dtype: of the accumulation.
    """
    wide = np.float64 if "float64" in dtype else np.float32
    with np.errstate(over="ignore", invalid="ignore"):
        exact = before.astype(wide) + added.astype(wide)
    if dtype in ("float32", "float64"):
        return exact
    return np.asarray(to_numbers(HostTensor(bits=to_bits(exact, dtype), dtype=dtype)))


def _explained(added: NDArray[np.float64], got: NDArray[np.float64], dtype: str) -> str:
    """Say what was added instead of dW, where that has a name."""
    square = float(np.vdot(added, added))
    if not np.isfinite(got).all() or not square:
        return ""
    size = math.sqrt(square)
    factor = float(np.vdot(added, got)) / square
    if float(np.linalg.norm(got - factor * added)) > 1e-4 * max(abs(factor), 1e-3) * size:
        return ""
    if abs(factor) < 1e-6:
        return "nothing was added"
    if abs(factor - 1) > 1e-4:
        return f"{factor:.6g} times dW was added"
    narrow = [name for name in ("bfloat16", "float16") if roundoff(name) > roundoff(dtype)]
    for name in narrow:
        if np.allclose(got, rounded(added, name), rtol=4 * roundoff(dtype), atol=1e-30):
            return f"dW was rounded to {name} first"
    return "another rounding than that of the dtype"


def _by_sketches(one: Accumulation) -> str | None:
    """Return what is wrong; empty: nothing beyond rounding; None: there are no sketches."""
    records = [one.after, one.added] + ([one.before] if one.before is not None else [])
    sketches = [sketch_of(record) for record in records]
    known = [found for found in sketches if found is not None]
    if len(known) < len(records):
        return None
    (after, _), (added, _) = known[:2]
    before = known[2][0] if len(known) > 2 else np.zeros_like(after)
    assert one.after is not None
    rounding = sum(error for _, error in known)
    size = float(np.linalg.norm(after))
    allowed = rounding + _SAMPLED * 2 * roundoff(one.after.dtype) * (size + float(np.linalg.norm(before)))
    off = float(np.linalg.norm(after - before - added))
    return f"by sketches {off:.2e} from the sum, rounding is at most {allowed:.1e}" if off > allowed else ""


def _by_means(one: Accumulation) -> str | None:
    """As ``_by_sketches``, of the means alone: a sum of elements is linear, too."""
    records: list[TensorRecord | None] = [one.after, one.added]
    records += [one.before] if one.before is not None else []
    moments = [moments_of(record) for record in records]
    known = [found for found in moments if found is not None]
    if len(known) < len(records):
        return None
    after, added, *before = (mean for mean, _ in known)
    assert one.after is not None
    allowed = (_MOMENTS + 2 * roundoff(one.after.dtype)) * sum(size for _, size in known)
    off = abs(after - sum(before) - added)
    return (
        f"its mean is {off:.2e} from that of the sum, rounding is at most {allowed:.1e}"
        if off > allowed
        else ""
    )
