"""The parameter after a step of the optimizer, computed anew in float64 from what the step read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from mindspeed_precision.records import Role
from mindspeed_precision.verify.adam import Bounded, Numbers, parameter_after
from mindspeed_precision.verify.descent import Descent, momentum_of
from mindspeed_precision.verify.elements import Vector, numbers, roundoff
from mindspeed_precision.verify.failures import Failure, failure, findings_of
from mindspeed_precision.verify.invariants.registry import invariant
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

_COUNT = "the step counter in the bias correction"


@invariant(
    "optimizer.update_not_recomputed",
    "optimizer.step_counter",
    holds="a parameter after a step is what the optimizer's formula gives in float64 from its inputs",
    unit="updates",
    span=[each_rank()],
)
def parameters_are_recomputed(facts: RunFacts) -> Answer:
    """Compute every parameter anew, from the moments as they were recorded after the step."""
    failures: list[Failure] = []
    exercised = 0
    left: Counter[str] = Counter()
    for update in every_update(facts):
        judged = _parameter(facts, update)
        if isinstance(judged, str):
            left[judged] += 1
            continue
        exercised += 1
        if judged:
            assert update.updated is not None
            failures.append(failure(update.updated, update.rank, *judged))
    counted = [one for one in failures if one.kind.startswith(_COUNT)]
    return Answer(
        exercised=exercised,
        findings=findings_of(
            [one for one in failures if one not in counted],
            id="optimizer.update_not_recomputed",
            title="a parameter is not what the optimizer's formula gives",
            remedy="compare what the kernel is called with to the parameter groups: eps, decoupled weight "
            "decay, bias correction",
        )
        + findings_of(
            counted,
            id="optimizer.step_counter",
            title="a parameter is what the optimizer's formula gives for another number of updates",
            remedy="the kernel wants the count before this update, or the one that includes it: it got the "
            "other; or the state began at another count than 0",
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
    elements, after = elements_of(facts, update), numbers(facts, update.rank, update.updated)
    if elements is None or after is None or elements.parameter is None:
        return NEEDS
    assert update.updated is not None
    after, kept = after.reshape(-1), roundoff(update.updated.dtype)
    if given is None or Role.EXP_AVG not in update.after or momentum_of(update):
        return _descent(facts, update, elements, after)
    if any(role in update.after and update.after[role].dtype not in PLAIN for role in MOMENTS):
        return "moments are kept with a scale, which is not recorded"
    moments = [numbers(facts, update.rank, update.after.get(role)) for role in MOMENTS]
    first, second = moments
    if first is None or second is None:
        return NEEDS
    narrow = max(roundoff(update.after[role].dtype) for role in MOMENTS)
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
    facts: RunFacts, update: Update, elements: Elements, after: Vector
) -> str | tuple[()] | tuple[str, str]:
    """Judge gradient descent; the momentum buffer is taken as it was recorded after the step."""
    given = Descent.of(facts, update)
    if isinstance(given, str):
        return given
    before, updated, record = elements.parameter, update.updated, momentum_of(update)
    assert before is not None
    assert updated is not None
    buffer = numbers(facts, update.rank, record) if given.momentum else None
    if given.momentum and buffer is None:
        return NEEDS
    flat = None if buffer is None else buffer.reshape(-1)
    narrow = 0.0 if flat is None or record is None else roundoff(record.dtype)

    def law(changed: Descent) -> Bounded:
        return changed.parameter(before, flat, elements.gradient, roundoff(updated.dtype), narrow)

    worst, beyond = law(given).worst(after)
    if worst <= 1:
        return ()
    found = f"{beyond} of {after.size} elements are off, by up to {worst:.3g} times what rounding allows"
    return found, _why_descent(given, lambda changed: law(changed).worst(after)[0] <= 1)


def _why_descent(given: Descent, fits: Callable[[Descent], bool]) -> str:
    """Name the one number that, changed, gives the parameter that is there."""
    wrong: list[tuple[str, dict[str, Any]]] = [("the parameter was not written", {"lr": 0.0})]
    if given.momentum:
        text = "nesterov was left out" if given.nesterov else "nesterov was applied, and is not asked for"
        wrong += [(text, {"nesterov": not given.nesterov})]
    return next((text for text, change in wrong if fits(replace(given, **change))), "")


def _why_parameter(given: Numbers, fits: Callable[[Numbers], bool]) -> str:
    """Name the one number that, changed, gives the parameter that is there."""
    wrong: list[tuple[str, dict[str, Any]]] = [
        (f"{_COUNT} was {count:g}, not {given.count:g}", {"count": count})
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
