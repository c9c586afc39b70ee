"""The momentum buffer of gradient descent after a step, computed anew from what it was and the gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mindspeed_precision.records import Role
from mindspeed_precision.verify.descent import Descent, begins, momentum_of
from mindspeed_precision.verify.elements import Vector, numbers, roundoff
from mindspeed_precision.verify.failures import Failure, failure
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.update_elements import NEEDS, PLAIN, elements_of
from mindspeed_precision.verify.updates import Update


def momentum(facts: RunFacts, update: Update) -> list[Failure] | str:
    """Return what is wrong with the buffer after an update, if anything, or why it is not judged."""
    given, record = Descent.of(facts, update), momentum_of(update)
    if isinstance(given, str) or record is None:
        return str(given)
    if record.dtype not in PLAIN:
        return f"kept as {record.dtype}, whose scale is not recorded"
    elements, after = elements_of(facts, update), numbers(facts, update.rank, record)
    before = None if begins(update) else numbers(facts, update.rank, update.before.get(Role.EXP_AVG))
    lacking = elements is None or elements.parameter is None or after is None
    if lacking or (before is None and not begins(update)):
        return NEEDS
    assert elements is not None
    assert elements.parameter is not None
    assert after is not None
    gradient, parameter, kept = elements.gradient, elements.parameter, roundoff(record.dtype)
    old, found = None if before is None else before.reshape(-1), after.reshape(-1)
    worst, beyond = given.buffer(old, gradient, parameter, kept).worst(found)
    if worst <= 1:
        return []

    def fits(changed: Descent, start: Vector | None) -> bool:
        return changed.buffer(start, gradient, parameter, kept).worst(found)[0] <= 1

    text = (
        f"{beyond} of {found.size} elements of the momentum buffer are off, by up to {worst:.3g} times what "
    )
    return [failure(record, update.rank, f"{text}rounding allows", _why(given, old, found, fits))]


def _why(
    given: Descent, before: Vector | None, found: Vector, fits: Callable[[Descent, Vector | None], bool]
) -> str:
    if before is None:
        return "the first gradient did not enter it whole" if given.dampening else ""
    if fits(given, None) or (before.any() and fits(given, np.zeros_like(before))):
        return "the state was lost before the step: it was zero"
    if np.array_equal(before, found):
        return "it was not updated"
    if given.dampening and fits(replace(given, dampening=0.0), before):
        return "dampening was left out"
    if given.weight_decay and fits(replace(given, weight_decay=0.0), before):
        return "weight decay was not applied"
    return ""
