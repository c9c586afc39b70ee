"""What two sketches tell of two tensors: estimates with their error, where elements were not kept.

With k = 256 and a difference x of more than k elements, ``‖sketch(x)‖² / ‖x‖²`` has the mean 1 and a
standard deviation of at most √(2/k) for every x, and the distribution of χ²_k / k where x is spread over
many elements (``docs/adr/0006-sketches-by-position.md``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from mindspeed_precision.compare.metrics import Metrics
from mindspeed_precision.compare.policy import Limit
from mindspeed_precision.record.sketch import BUCKETS, unpack
from mindspeed_precision.records import Digest, Sketch, TensorRecord

DEVIATION = 1 / math.sqrt(2 * BUCKETS)
"""Relative standard deviation of an estimated distance: 4.4 %."""

SMALLEST, LARGEST = 0.79, 1.22
"""Estimate over true distance with a chance of 1e-6 each: square roots of the quantiles of χ²_256 / 256.

For an error in m elements alone the chance is that two of them share a bucket, at most m² / 512: then the
squares differ by up to 2 / m, so that an error in two elements can vanish, once in 512 times.
"""

_SIGMAS = 4.75
"""Standard deviations of a normal distribution with a chance of 1e-6 on each side."""

_SUMS = 1e-14
"""Rounding of a cosine in float64: sums of 256 products, in whatever order a BLAS takes them."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """How far the candidate's tensor b is from the baseline's a, estimated from their sketches.

    Attributes:
        distance: ‖b − a‖ / ‖a‖; 0 where it is below what the sketches resolve.
        low: smallest true value that leaves such sketches, but for a chance of 1e-6.
        high: largest one.
        scale: α = ⟨a, b⟩ / ⟨a, a⟩.
        scale_error: bound on its error, but for a chance of 1e-6 on each side.
        residual: ‖b − αa‖ / ‖b‖.
        cosine: ⟨a, b⟩ / (‖a‖ ‖b‖).
        cosine_error: bound on its error, likewise.
    """

    distance: float
    low: float
    high: float
    scale: float
    scale_error: float
    residual: float
    cosine: float
    cosine_error: float


def estimate(baseline: TensorRecord, candidate: TensorRecord) -> Estimate | None:
    """Estimate the distance of two records; None where one has no sketch, or a side is zero.

    Norms are those of the statistics, which are not estimated; of a sum of partial sums, which has none, that
    of its sketch. Elements that are not finite count as zero.

    Args:
        baseline: a record.
        candidate: its partner; same shape and dtype.
    """
    one, two = baseline.digest.sketch, candidate.digest.sketch
    if one is None or two is None:
        return None
    size, other = _norm(baseline.digest, one), _norm(candidate.digest, two)
    if not (0 < size < math.inf and 0 < other < math.inf):
        return None
    # divided first, so that squares stay within float64
    a, b = unpack(one) / size, unpack(two) / size
    aa, bb, ab = float(a @ a), float(b @ b), float(a @ b)
    if not (aa > 0 and bb > 0):
        return None
    exact = baseline.numel <= BUCKETS and not baseline.dtype.startswith("complex")
    rounding = one.roundoff * math.sqrt(aa) + two.roundoff * math.sqrt(bb)
    gap = float(np.linalg.norm(b - a))
    scale, cosine = ab / aa, max(-1.0, min(1.0, ab / math.sqrt(aa) / math.sqrt(bb)))
    residual = float(np.linalg.norm(b - scale * a)) * size / other
    opening = 1 - cosine**2
    sampled = 0.0 if exact else _SIGMAS / math.sqrt(BUCKETS)
    return Estimate(
        distance=gap if gap > 2 * rounding else 0.0,
        low=max(gap - rounding, 0.0) / (1.0 if exact else LARGEST),
        high=(gap + rounding) / (1.0 if exact else SMALLEST),
        scale=scale,
        scale_error=rounding + sampled * residual * other / size,
        residual=residual,
        cosine=cosine,
        cosine_error=rounding * math.sqrt(opening) + rounding**2 + sampled * (2 + sampled) * opening + _SUMS,
    )


def _norm(digest: Digest, sketch: Sketch) -> float:
    if digest.statistics is not None:
        return digest.statistics.l2_norm
    return 0.0 if digest.exact else float(np.linalg.norm(unpack(sketch)))


def sketch_metrics(baseline: TensorRecord, candidate: TensorRecord) -> Metrics:
    """Return what sketches tell, in the digits that they support.

    Returns:
        ``sketch_distance`` (‖b − a‖ / ‖a‖, left out where it is below what they resolve), ``sketch_low`` and
        ``sketch_high`` (the true value is between, but for a chance of 1e-6 on each side), ``sketch_scale``,
        ``sketch_residual`` and ``sketch_cosine``. Empty where the records have no sketches.
    """
    found = estimate(baseline, candidate)
    if found is None:
        return {}
    metrics: Metrics = {"sketch_low": _digits(found.low), "sketch_high": _digits(found.high)}
    if found.distance:
        metrics["sketch_distance"] = _digits(found.distance)
    return metrics | {
        "sketch_scale": _to_error(found.scale, found.scale_error),
        "sketch_residual": _digits(found.residual),
        "sketch_cosine": _to_error(found.cosine, found.cosine_error),
    }


_LOW = {"rel_frobenius": "sketch_low", "noise_update_ratio": "sketch_update_ratio"}
_HIGH = {"rel_frobenius": "sketch_high", "update_share": "sketch_update_share"}
BOUNDED = {sketched: metric for ends in (_LOW, _HIGH) for metric, sketched in ends.items()} | {
    "sketch_update_least": "update_share"
}
"""Estimated ends, with the metric of elements that they are ends of.

Since an estimate sets no noise aside, ``sketch_update_least`` has a bound of its own."""


def sketch_limit(limits: Iterable[Limit], metrics: Mapping[str, float | int | bool]) -> Limit | None:
    """Return the bound on elements that an estimate decides, as a bound on that end of the estimate.

    Returns:
        A bound that even the smallest true value breaks; else one that even the largest holds; None where the
        estimate leaves them open.
    """
    known = list(limits)
    for limit in known:
        end = _LOW.get(limit.metric, "")
        if metrics.get(end, -math.inf) > limit.maximum:
            return replace(limit, metric=end)
    for limit in known:
        end = _HIGH.get(limit.metric, "")
        if metrics.get(end, math.inf) <= limit.maximum < math.inf:
            return replace(limit, metric=end)
    return None


def _digits(value: float) -> float:
    return float(f"{value:.1e}")


def _to_error(value: float, error: float) -> float:
    """Round to the last digit that the error leaves."""
    return round(value, max(0, -math.floor(math.log10(error)))) if 0 < error < 1 else float(round(value))
