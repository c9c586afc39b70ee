"""Gradient descent with momentum in float64, as ``torch.optim.SGD`` defines it, with what rounding may leave.

With g the gradient (its negative under ``maximize``) and p the parameter before the step::

    e = g + wd p        b' = e in the first step, then m b + (1 - dampening) e
    p' = p - lr b'      or, with ``nesterov``, p - lr (e + m b')

The fused kernels of Apex and Transformer Engine compute the same, or add weight decay
after the momentum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_precision.records import MOMENTUM, Role, TensorRecord
from mindspeed_precision.verify.adam import SINGLE, Bounded
from mindspeed_precision.verify.elements import Vector
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.updates import Update

UNRECORDED = "the momentum buffer is not recorded"
_SETTINGS = ("dampening", "nesterov", "maximize")


@dataclass(frozen=True, kw_only=True)
class Descent:
    """Hyperparameters of one update.

    Attributes:
        lr: learning rate.
        weight_decay: of this parameter; it is added to the gradient.
        momentum: of the buffer; 0: there is none.
        dampening: by which a gradient enters the buffer less, but for the first one.
        nesterov: the step goes along the gradient and the momentum that follows.
        maximize: the gradient is followed upwards.
    """

    lr: float
    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    maximize: bool = False

    @classmethod
    def of(cls, facts: RunFacts, update: Update) -> Descent | str:
        """Return the numbers of an update, or why it cannot be judged."""
        if "beta1" in update.numbers:
            return UNRECORDED
        lr, decay = update.numbers["lr"], update.numbers.get("weight_decay", 0.0)
        momentum = update.numbers.get("momentum", 0.0)
        name, settings = _group(facts, update)
        kind = name.rpartition(".")[2]
        if name and "SGD" not in kind:
            return f"{kind} is not computed anew"
        if not momentum:
            return cls(lr=lr, weight_decay=decay)
        if momentum_of(update) is None:
            return UNRECORDED
        if any(key not in settings for key in _SETTINGS[:2]):
            return "dampening and nesterov of its group were not recorded"
        if decay and kind != "SGD":
            return f"{kind} may add weight decay after the momentum"
        dampening, nesterov, maximize = (settings.get(key) or 0 for key in _SETTINGS)
        return cls(
            lr=lr,
            weight_decay=decay,
            momentum=momentum,
            dampening=float(dampening),
            nesterov=bool(nesterov),
            maximize=bool(maximize),
        )

    def effective(self, gradient: Vector, parameter: Vector) -> tuple[Vector, Vector]:
        """Return the gradient that enters, and the size of what it is the sum of."""
        decay = self.weight_decay * parameter
        return (-gradient if self.maximize else gradient) + decay, np.abs(gradient) + np.abs(decay)

    def buffer(self, before: Vector | None, gradient: Vector, parameter: Vector, kept: float) -> Bounded:
        """Return the momentum buffer after an update.

        Args:
            before: the buffer before it; None: this is the first one.
            gradient: applied.
            parameter: before it.
            kept: unit roundoff of the type in which the buffer is kept.
        """
        entering, size = self.effective(gradient, parameter)
        relative = 8 * SINGLE + 4 * kept
        if before is None:
            return Bounded(value=entering, error=relative * size)
        old, share = self.momentum * before, 1 - self.dampening
        return Bounded(value=old + share * entering, error=relative * (np.abs(old) + size))

    def parameter(
        self, before: Vector, buffer: Vector | None, gradient: Vector, kept: float, narrow: float = 0.0
    ) -> Bounded:
        """Return the parameter after an update.

        Args:
            before: the parameter.
            buffer: the momentum buffer after the update; None: there is none.
            gradient: applied.
            kept: unit roundoff of the parameter's type.
            narrow: of the buffer's, where that is wider: the kernel may know it more exactly.
        """
        entering, size = self.effective(gradient, before)
        step, reach = (entering, size) if buffer is None else (buffer, np.abs(buffer))
        if buffer is not None and self.nesterov:
            step = entering + self.momentum * buffer
            reach = size + self.momentum * np.abs(buffer)
        relative = 8 * SINGLE + 2 * kept + (4 * narrow if narrow > SINGLE else 0.0)
        error = (8 * SINGLE + 2 * kept) * np.abs(before) + relative * self.lr * reach
        return Bounded(value=before - self.lr * step, error=error)


def momentum_of(update: Update) -> TensorRecord | None:
    """Return the momentum buffer after an update, where it was recorded."""
    found = update.after.get(Role.EXP_AVG)
    return found if found is not None and found.key.slot == MOMENTUM else None


def begins(update: Update) -> bool:
    """Tell whether it is the first update of the whole training: there is no buffer before it."""
    return update.first and update.step == 0


def _group(facts: RunFacts, update: Update) -> tuple[str, Mapping[str, Any]]:
    """Return the optimizer's class and the settings of a parameter's group; empty where not recorded."""

    def groups() -> dict[str, tuple[str, Mapping[str, Any]]]:
        return {
            parameter["fqn"]: (group["optimizer"], group["settings"])
            for group in facts.ranks[update.rank].effective.get("groups", ())
            for parameter in group["parameters"]
        }

    return facts.once(("groups", update.rank), groups).get(update.fqn, ("", {}))
