"""The curves of two runs' schedules, where both say enough of their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed_precision.errors import ConfigError
from mindspeed_precision.records import Side
from mindspeed_precision.verify.schedule import Curves, curves_of
from mindspeed_precision.verify.settings import RunSettings


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What became of the question whether the schedules are the same.

    Attributes:
        curves: by side; empty where a run does not say enough.
        missing: why not.
    """

    curves: dict[Side, Curves]
    missing: str = ""

    @property
    def same(self) -> bool | None:
        """Whether every curve is the same as long as both train; None: it is not known."""
        if len(self.curves) < 2:
            return None
        one, two = self.curves[Side.BASELINE], self.curves[Side.CANDIDATE]
        steps = min(len(one.lr), len(two.lr))
        return all(
            list(getattr(one, name)[:steps]) == list(getattr(two, name)[:steps])
            for name in ("lr", "weight_decay", "batch_size", "consumed")
        )


def judged_schedules(settings: Mapping[Side, RunSettings]) -> Judged:
    """Return the curves of both runs, from what they say of their arguments."""
    side = Side.BASELINE
    try:
        one = curves_of(settings[side].arguments)
        side = Side.CANDIDATE
        two = curves_of(settings[side].arguments)
    except ConfigError as error:
        return Judged(curves={}, missing=f"the {side.value} says no {error.where}")
    return Judged(curves={Side.BASELINE: one, Side.CANDIDATE: two})
