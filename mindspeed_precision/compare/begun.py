"""What a step begins with: parameters that differ within tolerance, and what is computed from them.

Rounding in a gradient near zero turns its sign, and Adam makes of a sign a whole learning rate. Such elements
of a parameter are judged in units of what the optimizer can do (``compare.context``). What a later step
computes may differ by as much as the weights that it computes from do, in the same metric: that is measured,
on the weights as the step found them. One-dimensional parameters (biases begin at zero) are small beside what
they are added to, and do not count.

A record that is a parameter, bit for bit in both runs (a bias that a linear hands on), is judged as that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property

from mindspeed_precision.compare.depth import Depth
from mindspeed_precision.compare.metrics import Metrics, element_metrics
from mindspeed_precision.compare.reach import Reach
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.records import Pair, Phase, Role

FACTOR = 2.0
"""Largest error of what is computed, in units of that of the weights; 1.5 was the worst behind a norm."""

_COMPUTED = frozenset({Phase.FPROP, Phase.DGRAD, Phase.WGRAD, Phase.ACCUMULATE, Phase.REDUCE, Phase.CLIP})
_SCALARS = frozenset({Role.LOSS, Role.GRAD_NORM})
_METRICS = ("rel_frobenius", "max_ratio", "worst_rows_ratio")


class Begun:
    """The parameters with which both runs begin each step.

    Args:
        baseline: its run, for elements.
        candidate: its run.
        pairs: every pair of the two.
        depth: the layers of the model.
        reach: says with which steps both runs began with one state.
        tolerated: tells whether a pair is within tolerance: what a fault left in a weight excuses nothing.
    """

    def __init__(
        self,
        baseline: Run,
        candidate: Run,
        pairs: Sequence[Pair],
        *,
        depth: Depth,
        reach: Reach,
        tolerated: Callable[[Pair], bool],
    ) -> None:
        self._runs = (baseline, candidate)
        self._pairs = pairs
        self._depth = depth
        self._reach = reach
        self._tolerated = tolerated
        self._changes: dict[int, list[tuple[int, Metrics]]] = {}

    @cached_property
    def _parameters(self) -> dict[int, list[Pair]]:
        """By step, the parameters that it left, where the runs differ."""
        found: dict[int, list[Pair]] = defaultdict(list)
        for pair in self._pairs:
            left = pair.key.role is Role.PARAM and pair.key.phase is Phase.OPTIMIZER
            if left and not pair.baseline.digest.same_bits(pair.candidate.digest):
                found[pair.key.step].append(pair)
        return found

    @cached_property
    def _by_bits(self) -> dict[tuple[int, int, int], Pair]:
        return {
            (step, pair.baseline.digest.fingerprint, pair.candidate.digest.fingerprint): pair
            for step, pairs in self._parameters.items()
            for pair in pairs
            if pair.baseline.digest.exact and pair.candidate.digest.exact
        }

    def parameter(self, pair: Pair) -> Pair | None:
        """Return the parameter, as the step found it, that a module's tensor is; None: it is none."""
        known = pair.baseline.digest.exact and pair.candidate.digest.exact
        if pair.key.phase is not Phase.FPROP or not known:
            return None
        bits = pair.baseline.digest.fingerprint, pair.candidate.digest.fingerprint
        return self._by_bits.get((pair.key.step - 1, *bits))

    def allowance(self, pair: Pair, metric: str) -> float:
        """Return by how much a bound is wider because of the weights that a record was computed from."""
        key = pair.key
        if metric not in _METRICS or key.phase not in _COMPUTED or key.role in _SCALARS:
            return 0.0
        before = key.step - 1
        if self._reach.start_of(key.step) == key.step or before not in self._parameters:
            return 0.0
        place = self._depth.position(key.fqn) if key.phase is Phase.FPROP else self._depth.layers
        if before not in self._changes:
            left = [pair for pair in self._parameters[before] if len(pair.candidate.shape) > 1]
            self._changes[before] = [
                (self._depth.position(p.key.fqn), self._change(p)) for p in left if self._tolerated(p)
            ]
        errors = (change.get(metric, 0.0) for layer, change in self._changes[before] if layer <= place)
        return FACTOR * max(errors, default=0.0)

    def _change(self, pair: Pair) -> Metrics:
        """Return the errors of a weight; empty where its elements were not kept."""
        sides = (pair.baseline, pair.candidate)
        if any(side.payload is None for side in sides):
            return {}
        one, two = (run.ranks[pair.rank].payload(r) for run, r in zip(self._runs, sides, strict=True))
        return element_metrics(one, two)
