"""Named facts about two records: from the elements where both runs kept them, else from the statistics."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.compare.ulp import ulp_distance
from mindspeed_precision.errors import IncomparableError
from mindspeed_precision.record.elements import to_numbers
from mindspeed_precision.records import Placement, Statistics, TensorRecord

Metrics = dict[str, float | int | bool]

ROW_BLOCKS = 64
"""Most blocks of rows for which an error is kept: a few wrong rows drown in the error of a whole tensor."""


def kind_mismatch(baseline: TensorRecord, candidate: TensorRecord) -> str:
    """Say in one phrase why two records cannot be compared element by element; empty when they can.

    Never broadcast, never upcast: an implicit cast can erase the bug.
    """
    if baseline.shape != candidate.shape:
        return f"shape {list(baseline.shape)} in the baseline, {list(candidate.shape)} in the candidate"
    if baseline.dtype != candidate.dtype:
        return f"dtype {baseline.dtype} in the baseline, {candidate.dtype} in the candidate"
    if _numbering(baseline) != _numbering(candidate):
        return "the runs number the elements of a shard differently: schema 3 does as the whole tensor does"
    return ""


def _numbering(record: TensorRecord) -> object:
    """Return what says how the elements of a shard are numbered; None: by themselves."""
    placed = isinstance(record.place, Placement) and not record.place.whole
    return record.place if placed else record.part


def record_metrics(baseline: TensorRecord, candidate: TensorRecord) -> Metrics:
    """Compare what the two lines of the index say, without elements.

    Args:
        baseline: a record.
        candidate: its partner; same shape and dtype.

    Returns:
        ``bitwise``; ``permutation`` where the elements are the same in another order; with statistics on both
        sides also ``norm_change`` (relative to the baseline), ``norm_ratio``, ``extreme_change`` (change of
        minimum or maximum, whichever is larger, relative to the largest magnitude), and the ``*_baseline``
        and ``*_candidate`` counts of NaN, Inf and zero where they differ. Nothing that only elements could
        tell, except for a single number, whose value the index holds.
    """
    bitwise = baseline.digest.same_bits(candidate.digest)
    metrics: Metrics = {"bitwise": bitwise}
    if bitwise:
        return metrics
    known = baseline.digest.exact and candidate.digest.exact
    if known and baseline.digest.unordered == candidate.digest.unordered:
        metrics["permutation"] = True
    if baseline.digest.statistics is not None and candidate.digest.statistics is not None:
        metrics |= _statistics_metrics(baseline.digest.statistics, candidate.digest.statistics)
    one, two = baseline.value, candidate.value
    if one is not None and two is not None and math.isfinite(one) and math.isfinite(two):
        metrics |= _number_metrics(one, two)
    return metrics


def _number_metrics(one: float, two: float) -> Metrics:
    """Return what elements would tell of a single number, whose value the index holds."""
    error = abs(two - one)
    metrics: Metrics = {
        "mismatched": 1,
        "elements": 1,
        "max_abs_err": error,
        "mean_abs_err": error,
        "max_rel_err": _relative(error, abs(one)),
        "rel_frobenius": _relative(error, abs(one)),
        "max_ratio": _relative(error, abs(one)),
        "worst_rows_ratio": _relative(error, abs(one)),
    }
    if one and two:
        metrics["cosine"] = math.copysign(1.0, one * two)
        metrics["scale"] = two / one
    return metrics


def _statistics_metrics(baseline: Statistics, candidate: Statistics) -> Metrics:
    metrics: Metrics = {
        "norm_change": _relative(abs(candidate.l2_norm - baseline.l2_norm), baseline.l2_norm),
        "norm_ratio": candidate.l2_norm / baseline.l2_norm if baseline.l2_norm else math.inf,
    }
    moved = max(abs(candidate.minimum - baseline.minimum), abs(candidate.maximum - baseline.maximum))
    if math.isfinite(moved):
        metrics["extreme_change"] = _relative(moved, max(abs(baseline.minimum), abs(baseline.maximum)))
    counts = ("nans", "infs", "zeros") if baseline.counted and candidate.counted else ("nans", "infs")
    for name in counts:
        one, two = getattr(baseline, name), getattr(candidate, name)
        if one != two:
            metrics |= {f"{name}_baseline": one, f"{name}_candidate": two}
    return metrics


def element_metrics(baseline: HostTensor, candidate: HostTensor) -> Metrics:
    """Compare two payloads element by element, in float64.

    Elements that are not finite on both sides count as ``mismatched`` (unless the bits agree) and stay out of
    the errors; ``nonfinite_differ`` counts those that are not the same NaN or infinity on both sides.

    Args:
        baseline: ``[...]``.
        candidate: ``[...]``, same shape and dtype.

    Returns:
        ``mismatched`` (elements whose bits differ), ``elements``, ``max_abs_err``, ``mean_abs_err``,
        ``max_rel_err``, ``max_ulp`` (16 and 32 bit floats), ``rel_frobenius`` (‖b − a‖ / ‖a‖), ``max_ratio``
        (max |b − a| / max |a|), ``cosine``,
        ``scale`` (α = ⟨a, b⟩ / ⟨a, a⟩), ``scale_residual`` (‖b − αa‖ / ‖b‖), ``worst_rows_rel_err`` with
        ``worst_rows_first`` and ``worst_rows_count`` (largest relative Frobenius error of a block of rows),
        ``worst_rows_ratio`` (the same, but a block smaller than the tensor's rms block counts as the rms
        block: a few wrong rows show, a few rows that are next to nothing do not).

    Raises:
        IncomparableError: shapes or dtypes differ.
    """
    if baseline.dtype != candidate.dtype or baseline.bits.shape != candidate.bits.shape:
        raise IncomparableError(
            "payloads of different kinds",
            found=f"{candidate.dtype}{candidate.bits.shape}",
            expected=f"{baseline.dtype}{baseline.bits.shape}",
        )
    a, b = to_numbers(baseline).astype(np.float64), to_numbers(candidate).astype(np.float64)
    metrics: Metrics = {
        "mismatched": int(np.count_nonzero(baseline.bits != candidate.bits)),
        "elements": a.size,
    }
    finite = np.isfinite(a) & np.isfinite(b)
    if not finite.all():
        metrics["nonfinite"] = int(a.size - np.count_nonzero(finite))
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        metrics["nonfinite_differ"] = int(np.count_nonzero(~finite & ~same))
        a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
    metrics |= _error_metrics(a, b)
    if baseline.dtype in ("float16", "bfloat16", "float32") and a.size:
        metrics["max_ulp"] = int(ulp_distance(baseline, candidate).max())
    metrics |= _row_metrics(a, b)
    return metrics


def _error_metrics(a: NDArray[np.float64], b: NDArray[np.float64]) -> Metrics:
    if not a.size:
        return {}
    error = np.abs(b - a)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(error == 0, 0.0, error / np.abs(a))
    aa, bb, ab = float(np.vdot(a, a)), float(np.vdot(b, b)), float(np.vdot(a, b))
    metrics: Metrics = {
        "max_abs_err": float(error.max()),
        "mean_abs_err": float(error.mean()),
        "max_rel_err": float(relative.max()),
        "rel_frobenius": _relative(float(np.linalg.norm((b - a).ravel())), math.sqrt(aa)),
        "max_ratio": _relative(float(error.max()), float(np.abs(a).max())),
    }
    if aa > 0 and bb > 0:
        scale = ab / aa
        metrics["cosine"] = ab / math.sqrt(aa) / math.sqrt(bb)
        metrics["scale"] = scale
        metrics["scale_residual"] = float(np.linalg.norm((b - scale * a).ravel())) / math.sqrt(bb)
    return metrics


def _row_metrics(a: NDArray[np.float64], b: NDArray[np.float64]) -> Metrics:
    """Return the worst block of rows; leading dimensions are folded into rows."""
    if a.size == 0:
        return {}
    if a.ndim < 2:
        return {"worst_rows_ratio": _relative(float(np.linalg.norm(b - a)), float(np.linalg.norm(a)))}
    rows_a, rows_b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    starts = np.unique(np.linspace(0, len(rows_a), ROW_BLOCKS, endpoint=False).astype(int))
    error = np.add.reduceat(((rows_b - rows_a) ** 2).sum(axis=1), starts)
    size = np.add.reduceat((rows_a**2).sum(axis=1), starts)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(error == 0, 0.0, np.sqrt(error / size))
    worst = int(relative.argmax())
    stops = np.append(starts[1:], len(rows_a))
    floor = np.maximum(size, size.mean())
    ratio = math.sqrt(float((error / floor).max())) if floor.all() else _relative(float(error.max()), 0.0)
    return {
        "worst_rows_ratio": ratio,
        "worst_rows_rel_err": float(relative[worst]),
        "worst_rows_first": int(starts[worst]),
        "worst_rows_count": int(stops[worst] - starts[worst]),
    }


def _relative(error: float, size: float) -> float:
    if error == 0:
        return 0.0
    return error / size if size else math.inf
