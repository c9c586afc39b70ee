"""What the reduction multiplies a gradient by: the same number in both runs, however coarse the gradient is.

In bfloat16 two healthy layouts differ by a percent in every gradient, and a gradient that is scaled by 1.0003
drowns in that. But the way from main_grad to the reduced gradient is a product in float32 where nothing is
summed (one data-parallel rank): each run shows its factor to many digits, as a ratio of two norms of its own.
Where it is a sum over ranks, sketches show the factor (``compare.reduction``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mindspeed_precision.compare.reduction import Reductions
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.records import Pair, Phase, Role, TensorRecord

_Place = tuple[int, str, int]
"""Rank, parameter, step."""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """How a factor changed.

    Attributes:
        change: the candidate's factor over the baseline's, less one.
        error: bound on its error by the rounding of sketches.
    """

    change: float
    error: float


class Gains:
    """The factors of all gradients of two runs.

    Args:
        baseline: its run.
        candidate: its run.
        pairs: every pair of the two.
    """

    def __init__(self, baseline: Run, candidate: Run, pairs: Iterable[Pair]) -> None:
        sizes = {
            size
            for run in (baseline, candidate)
            for rank in run.ranks.values()
            for size in (rank.coordinates.dp_size, rank.coordinates.cp_size, rank.coordinates.ep_size)
        }
        self._reductions = Reductions(baseline), Reductions(candidate)
        summed = _summed_elsewhere(baseline) | _summed_elsewhere(candidate)
        self._last: dict[_Place, Pair] = {}
        for pair in pairs if sizes == {1} else ():
            if (pair.key.phase, pair.key.slot) == (Phase.ACCUMULATE, "after") and pair.key.fqn not in summed:
                known = self._last.get(_place(pair))
                if known is None or _order(known) < _order(pair):
                    self._last[_place(pair)] = pair

    def change(self, pair: Pair) -> Gain | None:
        """Return how the candidate's factor differs from the baseline's; None where one is not known.

        Args:
            pair: a reduced gradient; of any other record nothing is known.
        """
        if (pair.key.phase, pair.key.role) != (Phase.REDUCE, Role.REDUCED_GRAD):
            return None
        before = self._last.get(_place(pair))
        if before is not None:
            one = _ratio(pair.baseline, before.baseline)
            two = _ratio(pair.candidate, before.candidate)
            if one and two:
                return Gain(change=two / one - 1, error=0.0)
        # also of what canonical ranks have added up: of a sum over ranks no norm is known
        return self._summed(pair)

    def _summed(self, pair: Pair) -> Gain | None:
        """Return the change of the factor of a sum over ranks.

        A loss that is a mean over a rank's own tokens is divided by the number of ranks, one that is a sum
        over all tokens is not: whichever is nearer is meant.
        """
        one, two = self._reductions
        factors = one.factor(pair.key, pair.baseline), two.factor(pair.key, pair.candidate)
        if factors[0] is None or factors[1] is None or factors[0].value * factors[1].value <= 0:
            return None
        ratio = factors[1].value / factors[0].value
        meant = (ratio, ratio * two.data_ranks / one.data_ranks)
        nearest = min(meant, key=lambda found: abs(math.log(found)))
        return Gain(change=nearest - 1, error=sum(f.error / abs(f.value) for f in factors if f is not None))


def _summed_elsewhere(run: Run) -> set[str]:
    """Return the parameters whose gradient on a rank is one term of a sum: a tied embedding's, a norm's."""
    placed = ((p.fqn, p.placement) for rank in run.ranks.values() for p in rank.parameters)
    return {name for name, placement in placed if placement and (placement.partial or placement.copy_of)}


def _place(pair: Pair) -> _Place:
    return pair.rank, pair.key.fqn, pair.key.step


def _order(pair: Pair) -> tuple[int, int]:
    return pair.key.microbatch, pair.key.occurrence


def _ratio(after: TensorRecord, before: TensorRecord) -> float | None:
    """Return the ratio of two norms; None where one is not known, not finite or zero."""
    one, two = after.digest.statistics, before.digest.statistics
    if one is None or two is None or one.nans + one.infs + two.nans + two.infs:
        return None
    return one.l2_norm / two.l2_norm if one.l2_norm and two.l2_norm else None
