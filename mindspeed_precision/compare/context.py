"""What a bound may depend on beside the two records: the optimizer's reach, the terms of a gradient's sum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.compare.begun import Begun
from mindspeed_precision.compare.calibration import Calibration
from mindspeed_precision.compare.cancellation import GRADIENT_ROLES, Cancellation
from mindspeed_precision.compare.depth import Depth
from mindspeed_precision.compare.estimates import estimate
from mindspeed_precision.compare.gain import Gains
from mindspeed_precision.compare.metrics import Metrics
from mindspeed_precision.compare.policy import RecordRule
from mindspeed_precision.compare.reach import Reach
from mindspeed_precision.compare.routes import Routes
from mindspeed_precision.record.elements import UNIT_ROUNDOFF
from mindspeed_precision.records import Pair, Phase, Role

_ROUNDINGS = 4
"""Roundings of a parameter in one update: decay, product, sum, cast."""

_BLOCK = 0.01
"""Smallest share of a tensor's elements that is called a block."""

Elements = tuple[NDArray[np.float64], NDArray[np.float64]]


@dataclass(frozen=True, kw_only=True)
class Context:
    """Two runs, as far as the bounds of a policy depend on them.

    Attributes:
        reach: how far the optimizer can have moved a parameter.
        depth: how much rounding a record has behind it.
        cancellation: which gradients are noise.
        gains: what the reduction multiplies gradients by.
        begun: the parameters that each step begins with.
        routes: tokens that rounding sends to other experts.
        model: dtype of the parameters of the candidate; empty where it declared none.
        calibration: bounds that take the place of the policy's; None: no perturbed run was given.
    """

    reach: Reach
    depth: Depth
    cancellation: Cancellation
    gains: Gains
    begun: Begun
    routes: Routes
    model: str
    calibration: Calibration | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know of the bounds."""
        return (*((self.reach.note,) if self.reach.note else ()), *self.routes.notes())

    def allowance(self, pair: Pair, metric: str) -> float:
        """Return by how much a bound is wider than by rounding alone: what was tolerated before goes on."""
        return self.begun.allowance(pair, metric) + self.routes.allowance(pair, metric)

    def cancelled(self, pair: Pair, rule: RecordRule) -> NDArray[np.bool_] | None:
        """Tell which elements of a gradient are noise on both sides; None: hardly any is known to be.

        Single elements that happen to be small weigh nothing in the error of a tensor: only a block counts.
        """
        if pair.key.role not in GRADIENT_ROLES or not rule.cancels_below:
            return None
        noise = self.cancellation.noise(pair, rule.cancels_below, self.cancellation.elements(pair))
        return noise if noise is not None and noise.mean() >= _BLOCK else None

    def update_metrics(self, pair: Pair, rule: RecordRule) -> Metrics:
        """Measure how two updated parameters differ, in units of what the optimizer can do.

        Args:
            pair: a parameter after an update.
            rule: says below which share of what was summed a gradient is noise.

        Returns:
            ``norm_update_share``: the change of the norm; with elements of parameter and gradients also
            ``update_share``: the norm of the difference, over the elements whose gradient was not noise; each
            less a few roundings of the dtype, divided by the norm of an update that moved every element by
            the sum of the learning rates since the start. With elements, ``noise_update_ratio``: the largest
            difference of an element whose gradient was noise (of any element, where that is not known),
            divided by twice that sum. ``noise_elements`` counts them. With sketches instead of elements,
            ``sketch_update_share``: the largest value that the first can have, and ``sketch_update_ratio``:
            the smallest that the second can have, since a root mean square is not above the largest. Where no
            element can be noise, also ``sketch_update_least``: the smallest value that the first can have.
        """
        if pair.key.phase is not Phase.OPTIMIZER or pair.key.role not in (Role.PARAM, Role.MASTER_PARAM):
            return {}
        distance = self.reach.through(pair.key.step)
        rounding = _ROUNDINGS * UNIT_ROUNDOFF.get(pair.candidate.dtype, 0.0)

        def below(step: int) -> float:
            return rule.cancels_below + rule.cancels_growth * self.reach.before(step)

        noise = self.cancellation.noise_since_start(pair, below, self.reach.start_of(pair.key.step))
        elements = self.cancellation.elements(pair)
        if elements is None:
            whole = noise is not None and bool(noise.all())
            clear = not whole and not fnmatchcase(pair.key.fqn, rule.cancels_in_part)
            return self._norm_update(pair, distance, rounding, whole) | self._sketch_update(
                pair, distance, rounding, clear
            )
        return self._element_update(elements, distance, rounding, noise)

    def _norm_update(self, pair: Pair, distance: float, rounding: float, whole: bool) -> Metrics:
        one, two = pair.baseline.digest.statistics, pair.candidate.digest.statistics
        if one is None or two is None:
            return {}
        moved = max(abs(two.l2_norm - one.l2_norm) - rounding * one.l2_norm, 0.0)
        metrics: Metrics = {"noise_elements": pair.candidate.numel} if whole else {}
        room = distance * math.sqrt(pair.candidate.numel)
        # a tensor that is noise as a whole may move both ways as far as the optimizer can
        room *= 4 * self.reach.amplification if whole else 1.0
        return metrics | {"norm_update_share": share(moved, room)}

    def _sketch_update(self, pair: Pair, distance: float, rounding: float, clear: bool) -> Metrics:
        found, size = estimate(pair.baseline, pair.candidate), pair.baseline.digest.statistics
        if found is None or size is None:
            return {}
        room = distance * math.sqrt(pair.candidate.numel)
        low, high = (max(end - rounding, 0.0) * size.l2_norm for end in (found.low, found.high))
        metrics: Metrics = {"sketch_update_share": share(high, room)}
        metrics["sketch_update_ratio"] = share(low, 2 * self.reach.amplification * room)
        return metrics | ({"sketch_update_least": share(low, room)} if clear else {})

    def _element_update(
        self, elements: Elements, distance: float, rounding: float, noise: NDArray[np.bool_] | None
    ) -> Metrics:
        one, two = elements
        difference = np.abs(two - one)
        known = np.broadcast_to(noise, one.shape) if noise is not None else np.ones(one.shape, bool)
        rest = difference[~known]
        size = float(np.linalg.norm(one))
        metrics: Metrics = {}
        if noise is not None:
            moved = max(float(np.linalg.norm(rest)) - rounding * size, 0.0)
            metrics["update_share"] = share(moved, distance * math.sqrt(rest.size))
            metrics["noise_elements"] = int(np.count_nonzero(known))
        else:
            moved = max(abs(float(np.linalg.norm(two)) - size) - rounding * size, 0.0)
            metrics["norm_update_share"] = share(moved, distance * math.sqrt(one.size))
        largest = float(difference[known].max()) if known.any() else 0.0
        largest = max(largest - rounding * float(np.abs(one).max(initial=0.0)), 0.0)
        metrics["noise_update_ratio"] = share(largest, 2 * self.reach.amplification * distance)
        return metrics


def share(part: float, whole: float) -> float:
    """Return ``part / whole``; 0 for no part, infinity for a part of nothing."""
    if part == 0:
        return 0.0
    return part / whole if whole else math.inf
