"""What shows better than an option does whether two runs are the same: curves, batches, weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mindspeed_precision.verify.pair.batches import same_batches
from mindspeed_precision.verify.pair.weight_pairs import same_weights
from mindspeed_precision.verify.pair_facts import PairFacts

Judge = Callable[[PairFacts], bool | None]

JUDGES: Mapping[str, Judge] = {
    "schedule": lambda facts: facts.schedules.same,
    "data": same_batches,
    "weights": same_weights,
}
"""By the column ``judged_by``: True: the same; False: not; None: it was not recorded, or not compared."""
