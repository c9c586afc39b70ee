"""The optimizer's step, computed anew in float64 from what it read: moments, then the parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mindspeed_precision.records import Role, TensorRecord
from mindspeed_precision.verify.adam import (
    Bounded,
    Numbers,
    effective_gradient,
    first_moment,
    parameter_after,
    second_moment,
)
from mindspeed_precision.verify.elements import Vector, numbers, roundoff
from mindspeed_precision.verify.failures import Failure, failure, findings_of
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.moment_sums import wrong_sum
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.updates import Update, updates

_MOMENTS = {Role.EXP_AVG: "exp_avg", Role.EXP_AVG_SQ: "exp_avg_sq"}
_NEEDS = (
    "needs elements of the clipped gradient, exp_avg, exp_avg_sq and the parameter, after this step and "
    "the one before (preset check)"
)


def decay_is_coupled(facts: RunFacts) -> bool | None:
    """Return whether the configuration adds weight decay to the gradient; None: it does not say."""
    config = facts.config.get("optimizer_config", {})
    wanted = config.get("decoupled_weight_decay")
    return None if wanted is None else not wanted


@dataclass(frozen=True, kw_only=True)
class _Elements:
    """The elements of one update that were kept; None where they were not, or are not known to be zero."""

    gradient: Vector
    parameter: Vector | None
    first: Vector | None
    second: Vector | None


def _elements(facts: RunFacts, update: Update) -> _Elements | None:
    gradient = numbers(facts, update.rank, update.gradient)
    if gradient is None:
        return None
    flat = gradient.reshape(-1)

    def moment(role: Role) -> Vector | None:
        if role in update.before:
            found = numbers(facts, update.rank, update.before[role])
            return None if found is None else found.reshape(-1)
        return np.zeros_like(flat) if update.fresh else None

    return _Elements(
        gradient=flat,
        parameter=_before(facts, update),
        first=moment(Role.EXP_AVG),
        second=moment(Role.EXP_AVG_SQ),
    )


def _before(facts: RunFacts, update: Update) -> Vector | None:
    """Return the elements of what was updated as they were before, ``[n]``; of a range its own."""
    original, updated = update.original, update.updated
    values = numbers(facts, update.rank, original)
    if original is None or updated is None or values is None:
        return None
    flat = values.reshape(-1)
    if updated.part is not None and original.part != updated.part and updated.numel < flat.size:
        first = original.part[0] if original.part else 0
        flat = flat[updated.part[0] - first : updated.part[1] - first]
    return flat if flat.size == updated.numel else None


@invariant(
    "optimizer.state_not_recomputed",
    holds="exp_avg and exp_avg_sq after a step are what their own values before it and the gradient give",
    unit="moments",
)
def moments_are_recomputed(facts: RunFacts) -> Answer:
    """Compute both moments of every update anew."""
    failures: list[Failure] = []
    exercised, left, sums = 0, 0, 0
    for update in _every(facts):
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
        skipped=_limits(left, sums, exercised),
    )


def _limits(left: int, sums: int, exercised: int) -> str:
    parts = [f"{left} moments: {_NEEDS}"] if left else []
    parts += [f"{sums} by sums alone"] if sums else []
    return "; ".join(parts) or ("" if exercised else "no update of Adam was recorded")


def _every(facts: RunFacts) -> Iterator[Update]:
    for rank in facts.ranks:
        yield from updates(facts, rank)


def _moments(facts: RunFacts, update: Update) -> Iterator[tuple[TensorRecord | None, tuple[str, str] | None]]:
    """Yield each moment that was recorded, None where it cannot be judged, and what is wrong with it."""
    given = Numbers.of(update.numbers, coupled=bool(decay_is_coupled(facts)))
    elements = _elements(facts, update) if given is not None else None
    for role, name in _MOMENTS.items():
        after = update.after.get(role)
        if after is None or given is None:
            continue
        values = numbers(facts, update.rank, after)
        if elements is None or values is None:
            wrong = wrong_sum(update, role, given)
            yield (None, None) if wrong is None else (after, (f"{name}: {wrong}", "") if wrong else None)
            continue
        yield _judge_moment(after, name, values.reshape(-1), elements, given)


def _judge_moment(
    after: TensorRecord, name: str, values: Vector, elements: _Elements, given: Numbers
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


@invariant(
    "optimizer.update_not_recomputed",
    holds="a parameter after a step is what the optimizer's formula gives in float64 from its inputs",
    unit="updates",
)
def parameters_are_recomputed(facts: RunFacts) -> Answer:
    """Compute every parameter anew, from the moments as they were recorded after the step."""
    failures: list[Failure] = []
    exercised = 0
    left: Counter[str] = Counter()
    for update in _every(facts):
        judged = _parameter(facts, update)
        if isinstance(judged, str):
            left[judged] += 1
            continue
        exercised += 1
        if judged:
            assert update.updated is not None
            failures.append(failure(update.updated, update.rank, *judged))
    return Answer(
        exercised=exercised,
        findings=findings_of(
            failures,
            id="optimizer.update_not_recomputed",
            title="a parameter is not what the optimizer's formula gives",
            remedy="compare what the kernel is called with to the parameter groups: step counter "
            "(before or after this update), eps, decoupled weight decay, bias correction",
        ),
        failed=len(failures),
        skipped="; ".join(f"{count} updates: {reason}" for reason, count in left.items())
        if left
        else ("" if exercised else "no update was recorded"),
    )


def _parameter(facts: RunFacts, update: Update) -> str | tuple[()] | tuple[str, str]:
    """Return why an update cannot be judged; else nothing, or what is wrong with it and its kind."""
    coupled = decay_is_coupled(facts)
    given = Numbers.of(update.numbers, coupled=bool(coupled))
    elements, after = _elements(facts, update), numbers(facts, update.rank, update.updated)
    if elements is None or after is None or elements.parameter is None:
        return _NEEDS
    assert update.updated is not None
    after, kept = after.reshape(-1), roundoff(update.updated.dtype)
    if given is None or Role.EXP_AVG not in update.after:
        return _descent(update, elements, after, kept)
    moments = [numbers(facts, update.rank, update.after.get(role)) for role in _MOMENTS]
    first, second = moments
    if first is None or second is None:
        return _NEEDS
    narrow = max(roundoff(update.after[role].dtype) for role in _MOMENTS)
    before = elements.parameter

    def law(changed: Numbers) -> Bounded:
        return parameter_after(
            before, first.reshape(-1), second.reshape(-1), changed, kept=kept, moments=narrow
        )

    worst, beyond = law(given).worst(after)
    if worst <= 1 or any(law(other).worst(after)[0] <= 1 for other in _also_right(facts, given, coupled)):
        return ()
    found = f"{beyond} of {after.size} elements are off, by up to {worst:.3g} times what rounding allows"
    return found, _why_parameter(given, lambda changed: law(changed).worst(after)[0] <= 1)


def _also_right(facts: RunFacts, given: Numbers, coupled: bool | None) -> Iterator[Numbers]:
    """Yield other formulas that are right where it is not known which one the optimizer is to follow."""
    if coupled is None:
        yield replace(given, coupled=True)
    if facts.run.manifest.get("framework", {}).get("api") == "mindspore":  # its optimizers have several
        yield replace(given, early_eps=True)
        yield replace(given, corrected=False)


def _descent(
    update: Update, elements: _Elements, after: Vector, kept: float
) -> str | tuple[()] | tuple[str, str]:
    """Judge plain gradient descent; with momentum its buffer would be needed, which is not recorded."""
    if update.numbers.get("momentum", 0.0) or "beta1" in update.numbers:
        return "the momentum buffer is not recorded"
    before, lr = elements.parameter, update.numbers["lr"]
    assert before is not None
    step = lr * (elements.gradient + update.numbers.get("weight_decay", 0.0) * before)
    bound = Bounded(value=before - step, error=(8 * 2.0**-24 + 2 * kept) * (np.abs(before) + np.abs(step)))
    worst, beyond = bound.worst(after)
    if worst <= 1:
        return ()
    return f"{beyond} of {after.size} elements are off, by up to {worst:.3g} times what rounding allows", ""


def _why_parameter(given: Numbers, fits: Callable[[Numbers], bool]) -> str:
    """Name the one number that, changed, gives the parameter that is there."""
    wrong: list[tuple[str, dict[str, Any]]] = [
        (f"the step counter in the bias correction was {count:g}, not {given.count:g}", {"count": count})
        for count in (given.count + 1, given.count - 1, 1.0)
        if count > 0 and count != given.count
    ]
    wrong += [("moments were not corrected for their bias", {"corrected": False})]
    wrong += [
        (f"eps was {eps:g}, not {given.eps:g}", {"eps": eps})
        for eps in (1e-8, 1e-6, 1e-5, 1e-10, 1e-15, 1e-16, 0.0)
        if eps != given.eps
    ]
    if given.weight_decay:
        wrong += [("weight decay was not applied", {"weight_decay": 0.0})]
        wrong += [
            ("weight decay was added to the gradient, not to the parameter", {"coupled": not given.coupled})
        ]
    wrong += [
        (f"weight decay was {decay:g}, not {given.weight_decay:g}", {"weight_decay": decay})
        for decay in (0.1, 0.01)
        if decay != given.weight_decay
    ]
    wrong += [("the parameter was not written", {"lr": 0.0})]
    return next((text for text, change in wrong if fits(replace(given, **change))), "")
