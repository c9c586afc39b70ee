"""How far apart a pair is, as one number: relative, and in units of what is tolerated."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace

from mindspeed_precision.compare.verdict import TOLERANCES
from mindspeed_precision.record.elements import UNIT_ROUNDOFF
from mindspeed_precision.records import Comparison, Pair

LEVELS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 1e2, 1e3, 1e4, 1e5, 1e6, 1e8)
"""Upper ends of the levels in which an error in units of tolerance is shown; the last level has none."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The relative error of a pair.

    Attributes:
        value: ``‖b - a‖ / ‖a‖``; infinity where the baseline is zero.
        source: ``elements``; ``sketch`` (an estimate); ``policy``: by the bound that decided; ``norm``: the
            change of the norm, below which the error is not.
    """

    value: float
    source: str


def relative_error(comparison: Comparison) -> Size | None:
    """Return how far apart a pair is; None where nothing that was kept tells."""
    metrics = comparison.metrics
    if metrics.get("bitwise"):
        return Size(value=0.0, source="elements")
    for name, source in (
        ("rel_frobenius", "elements"),
        ("sketch_distance", "sketch"),
        ("sketch_high", "sketch"),
        ("norm_change", "norm"),
    ):
        value = metrics.get(name)
        if value and not math.isnan(value):
            return Size(value=float(value), source=source)
    return Size(value=0.0, source="elements") if metrics.get("rel_frobenius") == 0 else None


def in_tolerances(comparison: Comparison) -> Size | None:
    """Return the error in units of what the policy tolerates; None where it is not known.

    Where nothing is tolerated the unit is one rounding of the dtype to nearest (its unit roundoff).
    """
    metrics = comparison.metrics
    if metrics.get("bitwise"):
        return Size(value=0.0, source="elements")
    if TOLERANCES in metrics:
        return Size(value=float(metrics[TOLERANCES]), source="policy")
    size = relative_error(comparison)
    if size is None or not isinstance(comparison.pair, Pair):
        return None
    unit = UNIT_ROUNDOFF.get(comparison.pair.candidate.dtype)
    return replace(size, value=size.value / unit) if unit else None


def level_of(comparison: Comparison) -> tuple[int, bool]:
    """Return a level from 1 by ``in_tolerances`` (0: not known), and whether it is a bound below."""
    size = in_tolerances(comparison)
    return (0, False) if size is None else (bisect_left(LEVELS, size.value) + 1, size.source == "norm")
