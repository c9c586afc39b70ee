"""Symptoms of a training that goes wrong, from the losses and gradient norms that its log prints.

The list is that of the MindSpeed tuning guide: a loss that runs away, stays the same, jumps or swings, and a
gradient norm that jumps. A symptom says that something is wrong, never what: these are warnings. Used while
training (setting ``live_warnings``) and by ``check``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

WINDOW = 16
"""How many steps before one say what is usual."""

FEWEST = 5
"""Fewest steps before one of which anything can be called usual."""

LOSS_JUMP, NORM_JUMP = 1.5, 10.0
"""How many times the median of the window a loss, and a norm, must be to be a jump."""

RUNS_AWAY = 1.5
"""How many times the first loss the losses of a whole window must be."""

CONSTANT_STEPS = 3
"""How many steps must have one loss, bit for bit."""

SWINGS = 10
"""How many changes of the loss in a row must alternate."""

SWING_SIZE = 0.1
"""How large they must be on average, relative to the loss."""


@dataclass(frozen=True, kw_only=True)
class Symptom:
    """Something a person would see in the log.

    Attributes:
        id: of the finding.
        step: where it was seen first.
        title: in one sentence.
        evidence: numbers.
    """

    id: str
    step: int
    title: str
    evidence: str


Series = Sequence[tuple[int, float]]
"""Steps and values, ascending; values may be NaN or infinite."""


def symptoms(losses: Series, norms: Series) -> list[Symptom]:
    """Return what is seen in the losses and norms of a training, each kind at its first step."""
    seen = (_constant(losses), _runs_away(losses), _loss_jumps(losses), _swings(losses), _norm_jumps(norms))
    return [symptom for symptom in seen if symptom is not None]


def _finite(series: Series) -> list[tuple[int, float]]:
    return [(step, value) for step, value in series if math.isfinite(value)]


def _constant(losses: Series) -> Symptom | None:
    run = 1
    for (_, before), (step, value) in pairwise(losses):
        run = run + 1 if value == before else 1
        if run >= CONSTANT_STEPS:
            return Symptom(
                id="symptom.loss_constant",
                step=step - run + 1,
                title="the loss is the same, to the last bit, in several steps",
                evidence=f"{value:.8g} in {run} steps until step {step}",
            )
    return None


def _jump(series: Series, is_jump: Callable[[float, float], bool]) -> tuple[int, float, float] | None:
    """Return step, value and the usual value where a series jumps first."""
    values = _finite(series)
    for index in range(FEWEST, len(values)):
        step, value = values[index]
        usual = median(earlier for _, earlier in values[max(0, index - WINDOW) : index])
        if usual > 0 and is_jump(value, usual):
            return step, value, usual
    return None


def _loss_jumps(losses: Series) -> Symptom | None:
    found = _jump(losses, lambda value, usual: value > LOSS_JUMP * usual and value - usual > 0.5)
    if found is None:
        return None
    step, value, usual = found
    evidence = f"{value:.6g} at step {step}; the median of the steps before is {usual:.6g}"
    return Symptom(id="symptom.loss_spike", step=step, title="the loss jumps", evidence=evidence)


def _norm_jumps(norms: Series) -> Symptom | None:
    found = _jump(norms, lambda value, usual: value > NORM_JUMP * usual)
    if found is None:
        return None
    step, value, usual = found
    evidence = f"{value:.6g} at step {step}; the median of the steps before is {usual:.6g}"
    return Symptom(
        id="symptom.grad_norm_spike", step=step, title="the gradient norm jumps", evidence=evidence
    )


def _runs_away(losses: Series) -> Symptom | None:
    values = _finite(losses)
    if not values or values[0][1] <= 0:
        return None
    first = values[0][1]
    for index in range(FEWEST, len(values)):
        window = values[index - FEWEST + 1 : index + 1]
        if all(value > RUNS_AWAY * first for _, value in window):
            return Symptom(
                id="symptom.loss_runs_away",
                step=window[0][0],
                title="the loss has left where it began, upwards, and stays there",
                evidence=f"{first:.6g} at step {values[0][0]}, {window[-1][1]:.6g} at step {window[-1][0]}",
            )
    return None


def _swings(losses: Series) -> Symptom | None:
    values = _finite(losses)
    changes = [(two[0], two[1] - one[1]) for one, two in pairwise(values)]
    for end in range(SWINGS, len(changes) + 1):
        window = [change for _, change in changes[end - SWINGS : end]]
        levels = [abs(value) for _, value in values[end - SWINGS : end + 1]]
        alternate = all(one * two < 0 for one, two in pairwise(window))
        size = sum(map(abs, window)) / len(window)
        if alternate and size > SWING_SIZE * sum(levels) / len(levels):
            step = changes[end - SWINGS][0]
            return Symptom(
                id="symptom.loss_oscillates",
                step=step,
                title="the loss goes up and down from step to step",
                evidence=f"{SWINGS} changes in a row alternate from step {step}, by {size:.4g} on average",
            )
    return None
