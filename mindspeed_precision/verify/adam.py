"""Adam, AdamW and SGD in float64, with what rounding in float32 may leave.

Kingma and Ba 2015, algorithm 1, and Loshchilov and Hutter 2019, algorithm 2, with lr folded into the decay as
``torch.optim.AdamW``, Apex and MindSpeed do::

    m' = b1 m + (1 - b1) g        v' = b2 v + (1 - b2) g^2        t = updates so far, this one included
    p' = p - lr wd p - lr (m' / (1 - b1^t)) / (sqrt(v' / (1 - b2^t)) + eps)

Coupled (Adam with L2): ``g + wd p`` takes the place of g, and nothing decays. Bounds: a float32 kernel may
form ``1 - b`` and ``1 - b^t`` in float32, which is off by a roundoff of 1, not of the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mindspeed_precision.record.elements import UNIT_ROUNDOFF
from mindspeed_precision.verify.elements import Vector

SINGLE = UNIT_ROUNDOFF["float32"]
TINY = 2.0**-126
"""Numbers below it may be flushed to zero by a kernel of float32."""


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Hyperparameters of one update.

    Attributes:
        lr: learning rate.
        weight_decay: of this parameter.
        beta1: of exp_avg.
        beta2: of exp_avg_sq.
        eps: added to the root.
        count: updates so far, this one included; the t of the bias corrections.
        coupled: weight decay is added to the gradient (Adam with L2), not to the parameter (AdamW).
        corrected: moments are divided by their bias corrections.
        early_eps: eps is added to the root before its bias correction (``nn.Adam`` of MindSpore; Kingma and
            Ba, the end of section 2).
    """

    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    count: float
    coupled: bool = False
    corrected: bool = True
    early_eps: bool = False

    @classmethod
    def of(cls, numbers: Mapping[str, float], *, coupled: bool = False) -> Numbers | None:
        """Return the numbers as an optimizer recorded them before the update; None where some are missing."""
        try:
            return cls(
                lr=numbers["lr"],
                weight_decay=numbers.get("weight_decay", 0.0),
                beta1=numbers["beta1"],
                beta2=numbers["beta2"],
                eps=numbers["eps"],
                count=numbers["step"] + 1,
                coupled=coupled,
            )
        except KeyError:
            return None

    def correction(self, beta: float) -> tuple[float, float]:
        """Return ``1 - beta^t`` and the relative error with which float32 may know it."""
        if not self.corrected or self.count <= 0:
            return 1.0, 0.0
        power = beta**self.count
        return 1 - power, SINGLE * (1 + (1 + self.count) * power) / (1 - power) if power < 1 else np.inf


@dataclass(frozen=True, kw_only=True)
class Bounded:
    """A tensor, and by how much a float32 kernel may miss each of its elements."""

    value: Vector
    error: Vector

    def worst(self, found: Vector) -> tuple[float, int]:
        """Return the largest distance of ``found`` over its bound, and the number of elements beyond it."""
        ratio = np.abs(found - self.value) / np.maximum(self.error, TINY)
        ratio = np.where(np.isnan(ratio), np.inf, ratio)
        return (float(ratio.max()), int((ratio > 1).sum())) if ratio.size else (0.0, 0)


def effective_gradient(gradient: Vector, parameter: Vector | None, numbers: Numbers) -> Vector | None:
    """Return the gradient that enters the moments; None where a coupled decay lacks the parameter."""
    if not (numbers.coupled and numbers.weight_decay):
        return gradient
    return None if parameter is None else gradient + numbers.weight_decay * parameter


def first_moment(before: Vector, gradient: Vector, beta: float, kept: float) -> Bounded:
    """Return exp_avg after an update.

    Args:
        before: exp_avg before it.
        gradient: applied.
        beta: beta1.
        kept: unit roundoff of the type in which it is kept.
    """
    old, new = beta * before, (1 - beta) * gradient
    error = (8 * SINGLE + 2 * kept) * (np.abs(old) + np.abs(new)) + 2 * SINGLE * (
        np.abs(gradient) + np.abs(before)
    )
    return Bounded(value=old + new, error=error)


def second_moment(before: Vector, gradient: Vector, beta: float, kept: float) -> Bounded:
    """As ``first_moment``, of exp_avg_sq."""
    old, new = beta * before, (1 - beta) * gradient**2
    return Bounded(value=old + new, error=(8 * SINGLE + 2 * kept) * (old + new) + 2 * SINGLE * gradient**2)


def parameter_after(
    before: Vector, first: Vector, second: Vector, numbers: Numbers, *, kept: float, moments: float
) -> Bounded:
    """Return the parameter after an update.

    Args:
        before: the parameter.
        first: exp_avg after the update.
        second: exp_avg_sq after it.
        numbers: as applied.
        kept: unit roundoff of the parameter's type.
        moments: largest unit roundoff of the moments' types; the kernel may know them more exactly.
    """
    one, one_error = numbers.correction(numbers.beta1)
    two, two_error = numbers.correction(numbers.beta2)
    decayed = before if numbers.coupled else before * (1 - numbers.lr * numbers.weight_decay)
    with np.errstate(divide="ignore", invalid="ignore"):
        root = np.sqrt(second)
        added = (
            (root + numbers.eps) / np.sqrt(two) if numbers.early_eps else root / np.sqrt(two) + numbers.eps
        )
        step = numbers.lr * (first / one) / added
    relative = 32 * SINGLE + 2 * (one_error + two_error) + (4 * moments if moments > SINGLE else 0.0)
    error = (4 * SINGLE + 2 * kept) * (np.abs(before) + np.abs(decayed - step)) + relative * np.abs(step)
    # a root of a flushed exp_avg_sq, and lr that float32 rounds
    return Bounded(value=decayed - step, error=error + SINGLE * np.abs(step))
