"""The moments of Adam without their elements: what is linear in them can still be computed anew.

``m' = b1 m + (1 - b1) g`` holds of sketches and of means as it does of elements. ``v' = b2 v + (1 - b2) g^2``
holds of the sums over all elements, where that of ``g^2`` is the square of the norm of g.
"""

from __future__ import annotations

import numpy as np

from mindspeed_precision.records import Role, TensorRecord
from mindspeed_precision.verify.adam import SINGLE, Numbers
from mindspeed_precision.verify.elements import moments_of, roundoff, sketch_of
from mindspeed_precision.verify.updates import Update

_SAMPLED = 1.22
"""A sketch of an error is at most so much longer than the error, but for a chance of 1e-6 (ADR 6)."""

_SUMS = 2.0**-16
"""Relative error of sums and norms that a device took in float32."""


def wrong_sum(update: Update, role: Role, given: Numbers) -> str | None:
    """Return what is wrong with a moment, as far as sums tell; empty: nothing; None: they do not tell.

    Args:
        update: one update.
        role: ``EXP_AVG`` or ``EXP_AVG_SQ``.
        given: the hyperparameters that it was made with.
    """
    if given.coupled and given.weight_decay:
        return None
    before = update.before.get(role)
    if before is None and not update.fresh:
        return None
    if role is Role.EXP_AVG_SQ:
        return _squares(update.after[role], before, update.gradient, given.beta2)
    found = _sketches(update.after[role], before, update.gradient, given.beta1)
    return _means(update.after[role], before, update.gradient, given.beta1) if found is None else found


def _sketches(
    after: TensorRecord, before: TensorRecord | None, gradient: TensorRecord, beta: float
) -> str | None:
    new, old, added = sketch_of(after), sketch_of(before), sketch_of(gradient)
    if new is None or added is None or (before is not None and old is None):
        return None
    kept = old if old is not None else (np.zeros_like(new[0]), 0.0)
    expected = beta * kept[0] + (1 - beta) * added[0]
    size = float(np.linalg.norm(kept[0]) + np.linalg.norm(added[0]))
    allowed = new[1] + kept[1] + added[1] + _SAMPLED * (10 * SINGLE + 2 * roundoff(after.dtype)) * size
    return _beyond(float(np.linalg.norm(new[0] - expected)), allowed, "by sketches")


def _means(
    after: TensorRecord, before: TensorRecord | None, gradient: TensorRecord, beta: float
) -> str | None:
    new, old, added = moments_of(after), moments_of(before), moments_of(gradient)
    if new is None or added is None or (before is not None and old is None):
        return None
    kept = old or (0.0, 0.0)
    expected = beta * kept[0] + (1 - beta) * added[0]
    allowed = (_SUMS + 2 * roundoff(after.dtype)) * (kept[1] + added[1])
    return _beyond(abs(new[0] - expected), allowed, "by means")


def _squares(
    after: TensorRecord, before: TensorRecord | None, gradient: TensorRecord, beta: float
) -> str | None:
    new, old, added = moments_of(after), moments_of(before), moments_of(gradient)
    if new is None or added is None or (before is not None and old is None):
        return None
    kept = old[0] if old is not None else 0.0
    expected = beta * kept + (1 - beta) * added[1] ** 2
    # 1 - beta may be formed in float32, and squares below float32 are lost
    allowed = (_SUMS + 2 * roundoff(after.dtype)) * expected + 2 * SINGLE * added[1] ** 2 + 2.0**-126
    return _beyond(abs(new[0] - expected), allowed, "by its mean and the norm of the gradient")


def _beyond(off: float, allowed: float, way: str) -> str:
    return f"{way} it is {off:.2e} off, rounding is at most {allowed:.1e}" if off > allowed else ""
