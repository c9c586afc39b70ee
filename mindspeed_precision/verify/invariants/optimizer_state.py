"""Adam's moments after a step, computed anew in float64 from what they were before it and the gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from mindspeed_precision.records import TensorRecord
from mindspeed_precision.verify.adam import Numbers, effective_gradient, first_moment, second_moment
from mindspeed_precision.verify.elements import Vector, numbers, roundoff
from mindspeed_precision.verify.failures import Failure, failure, findings_of
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.moment_sums import wrong_sum
from mindspeed_precision.verify.momentum_buffers import momentum
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import each_rank
from mindspeed_precision.verify.update_elements import (
    MOMENTS,
    NEEDS,
    PLAIN,
    Elements,
    decay_is_coupled,
    elements_of,
    every_update,
)
from mindspeed_precision.verify.updates import Update


@invariant(
    "optimizer.state_not_recomputed",
    holds="moments and momentum after a step are what their own values before it and the gradient give",
    unit="moments",
    span=[each_rank()],
)
def moments_are_recomputed(facts: RunFacts) -> Answer:
    """Compute both moments of every update anew."""
    failures: list[Failure] = []
    lost: Counter[str] = Counter()
    exercised, left, sums = 0, 0, 0
    for update in every_update(facts):
        if update.numbers.get("momentum") and "beta1" not in update.numbers:
            judged = momentum(facts, update)
            if isinstance(judged, str):
                lost[judged] += 1
                continue
            exercised += 1
            failures += judged
            continue
        for found, problem in _moments(facts, update):
            if found is None:
                left += 1
                continue
            exercised += 1
            sums += not found.payload
            if problem:
                failures.append(failure(found, update.rank, *problem))
    return Answer(
        exercised=exercised,
        findings=findings_of(
            failures,
            id="optimizer.state_not_recomputed",
            title="a moment of the optimizer is not what its inputs give",
            remedy="which betas did the kernel get, was the state lost or loaded, was the gradient "
            "another one?",
        ),
        failed=len(failures),
        skipped=_limits(left, sums, lost)
        or ("" if exercised else "no update of Adam, or with momentum, was recorded"),
    )


def _limits(left: int, sums: int, lost: Mapping[str, int]) -> str:
    parts = [f"{left} moments: {NEEDS}"] if left else []
    parts += [f"{sums} by sums alone"] if sums else []
    parts += [f"{count} momentum buffers: {reason}" for reason, count in lost.items()]
    return "; ".join(parts)


def _moments(facts: RunFacts, update: Update) -> Iterator[tuple[TensorRecord | None, tuple[str, str] | None]]:
    """Yield each moment that was recorded, None where it cannot be judged, and what is wrong with it."""
    given = Numbers.of(update.numbers, coupled=bool(decay_is_coupled(facts)))
    elements = elements_of(facts, update) if given is not None else None
    for role, name in MOMENTS.items():
        after = update.after.get(role)
        if after is None or given is None:
            continue
        if after.dtype not in PLAIN:
            yield None, None
            continue
        values = numbers(facts, update.rank, after)
        if elements is None or values is None:
            wrong = wrong_sum(update, role, given)
            yield (None, None) if wrong is None else (after, (f"{name}: {wrong}", "") if wrong else None)
            continue
        yield _judge_moment(after, name, values.reshape(-1), elements, given)


def _judge_moment(
    after: TensorRecord, name: str, values: Vector, elements: Elements, given: Numbers
) -> tuple[TensorRecord | None, tuple[str, str] | None]:
    law, before, beta = (
        (first_moment, elements.first, given.beta1)
        if name == "exp_avg"
        else (second_moment, elements.second, given.beta2)
    )
    gradient = effective_gradient(elements.gradient, elements.parameter, given)
    if gradient is None or not np.isfinite(gradient).all():
        return None, None
    kept = roundoff(after.dtype)

    def fits(old: Vector, new: Vector, weight: float) -> bool:
        return law(old, new, weight, kept).worst(values)[0] <= 1

    if before is None:  # resumed: what the state was is not known, but zero it was not
        lost = given.count > 1 and elements.gradient.any() and fits(np.zeros_like(gradient), gradient, beta)
        if not lost:
            return None, None
        text = f"after {given.count - 1:.0f} updates it is what a state of zeros gives"
        return after, (f"{name} {text}", "the state was lost")
    worst, beyond = law(before, gradient, beta, kept).worst(values)
    if worst <= 1:
        return after, None
    found = (
        f"{beyond} of {values.size} elements of {name} are off, by up to {worst:.3g} times what "
        "rounding allows"
    )
    return after, (found, _why_moment(name, before, gradient, values, beta, fits))


def _why_moment(
    name: str,
    before: Vector,
    gradient: Vector,
    values: Vector,
    beta: float,
    fits: Callable[[Vector, Vector, float], bool],
) -> str:
    if before.any() and fits(np.zeros_like(before), gradient, beta):
        return "the state was lost before the step: it was zero"
    used = gradient if name == "exp_avg" else gradient**2
    away = before - used
    square = float(np.vdot(away, away))
    fitted = float(np.vdot(values - used, away)) / square if square else beta
    if abs(fitted - beta) > 1e-6 and fits(before, gradient, fitted):
        return f"the kernel used {'beta1' if name == 'exp_avg' else 'beta2'} = {fitted:.6g}, not {beta:g}"
    if fits(before, np.zeros_like(gradient), beta):
        return "the gradient did not enter it"
    if fits(before, gradient, 1.0):
        return "it was not updated"
    return ""
