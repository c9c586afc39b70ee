"""What the reduction multiplies a gradient by: the same number in both runs, however coarse the gradient is.

In bfloat16 two healthy layouts differ by a percent in every gradient, and a gradient that is scaled by 1.0003
drowns in that. But the way from main_grad to the reduced gradient is a product in float32 where nothing is
summed (one data-parallel rank): each run shows its factor to many digits, as a ratio of two norms of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from mindspeed_precision.dump.reader import Run
from mindspeed_precision.records import Pair, Phase, Role, TensorRecord

_Place = tuple[int, str, int]
"""Rank, parameter, step."""


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
        self._last: dict[_Place, Pair] = {}
        for pair in pairs if sizes == {1} else ():
            if pair.key.phase is Phase.ACCUMULATE and pair.key.slot == "after":
                known = self._last.get(_place(pair))
                if known is None or _order(known) < _order(pair):
                    self._last[_place(pair)] = pair

    def change(self, pair: Pair) -> float | None:
        """Return the candidate's factor over the baseline's, less one; None where one is not known.

        Args:
            pair: a reduced gradient; of any other record nothing is known.
        """
        before = self._last.get(_place(pair))
        if before is None or (pair.key.phase, pair.key.role) != (Phase.REDUCE, Role.REDUCED_GRAD):
            return None
        one = _ratio(pair.baseline, before.baseline)
        two = _ratio(pair.candidate, before.candidate)
        return two / one - 1 if one and two else None


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
