"""Two parameters of one name before the first step: in which of the known ways do they differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.compare.estimates import estimate
from mindspeed_precision.record.elements import to_bits, to_numbers
from mindspeed_precision.records import Side, Statistics, TensorRecord
from mindspeed_precision.verify.pair_facts import PairFacts, Weight

_CASTS = ("float16", "bfloat16", "float32")
_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
_ALIKE = 1e-5
"""Relative distance below which a scaled tensor counts as the other's multiple (roundings of float32)."""


class Way(str, Enum):
    """How two weights differ."""

    SAME = "same"
    SHAPE = "shape"
    TRANSPOSED = "transposed"
    PERMUTED = "permuted"
    CAST = "cast"
    SCALED = "scaled"
    SPREAD = "spread"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class WeightDifference:
    """What was found about one parameter.

    Attributes:
        fqn: its name.
        way: how it differs.
        detail: facts in one phrase: which rows, which factor, which dtype.
        baseline: the weight there.
        candidate: likewise.
        sure: decided by bits or elements; else estimated from sketches or moments.
    """

    fqn: str
    way: Way
    detail: str
    baseline: Weight
    candidate: Weight
    sure: bool = True


def pairs(facts: PairFacts) -> Iterator[tuple[str, Weight, Weight]]:
    """Yield the weights that both runs recorded before the first step."""
    one, two = facts.weights[Side.BASELINE], facts.weights[Side.CANDIDATE]
    for place, weight in one.items():
        if place in two:
            yield place[1], weight, two[place]


def same_weights(facts: PairFacts) -> bool | None:
    """Tell whether all weights before the first step have the same bits; None: they were not compared."""
    found = list(pairs(facts))
    if not found or facts.uncertain:
        return None
    return all(one.record.digest.same_bits(two.record.digest) for _, one, two in found)


def difference(fqn: str, one: Weight, two: Weight) -> WeightDifference:
    """Return how two weights differ, told by bits, then by elements, then by sketches and moments.

    Raises:
        DumpError: elements that were kept cannot be read.
    """
    way, detail, sure = _told(one, two)
    return WeightDifference(fqn=fqn, way=way, detail=detail, baseline=one, candidate=two, sure=sure)


def told_by_digest(left: TensorRecord, right: TensorRecord) -> tuple[Way, str]:
    """Return how two records of one shape differ, by fingerprints, moments and sketches alone."""
    if left.dtype == right.dtype and left.digest.same_bits(right.digest):
        return Way.SAME, ""
    if left.dtype == right.dtype and left.digest.exact and left.digest.unordered == right.digest.unordered:
        return _permuted(left, None, None)[:2]
    return _by_estimate(left, right)[:2]


def _told(one: Weight, two: Weight) -> tuple[Way, str, bool]:
    left, right = one.record, two.record
    same_elements = left.digest.exact and left.digest.unordered == right.digest.unordered
    if left.shape != right.shape:
        reshaped = left.numel == right.numel and same_elements and left.dtype == right.dtype
        transposed = left.shape == right.shape[::-1] and reshaped
        shapes = f"{list(left.shape)} in the baseline, {list(right.shape)} in the candidate"
        if transposed:
            return Way.TRANSPOSED, f"{shapes}, the same elements", True
        return Way.SHAPE, shapes + (", the same elements" if reshaped else ""), True
    if left.dtype == right.dtype and left.digest.same_bits(right.digest):
        return Way.SAME, "", True
    elements = one.elements(), two.elements()
    if left.dtype == right.dtype and same_elements:
        return _permuted(left, *elements)
    if elements[0] is not None and elements[1] is not None:
        return _by_elements(elements[0], elements[1])
    return _by_estimate(left, right)


def _permuted(record: TensorRecord, one: HostTensor | None, two: HostTensor | None) -> tuple[Way, str, bool]:
    """The same elements in another order: transposed, rows moved, or otherwise."""
    if one is None or two is None:
        hint = " (which one was not told apart from a transpose: no elements were kept)"
        square = len(record.shape) == 2 and record.shape[0] == record.shape[1]
        return Way.PERMUTED, "the same elements in another order" + (hint if square else ""), True
    left, right = one.bits, two.bits
    if left.ndim == 2 and left.shape[0] == left.shape[1] and np.array_equal(left.T, right):
        return Way.TRANSPOSED, "square, and the other run's transpose", True
    moved = moved_rows(left, right) if left.ndim >= 1 else None
    if moved is None:
        return Way.PERMUTED, "the same elements in another order, not by whole rows", True
    return Way.PERMUTED, f"rows are permuted{pattern_of(moved)}", True


def moved_rows(left: NDArray[Any], right: NDArray[Any]) -> NDArray[np.int64] | None:
    """Return of each row of ``right`` the row of ``left`` that it is; None: some is no row of it."""
    rows: dict[bytes, list[int]] = {}
    for number, row in enumerate(left):
        rows.setdefault(row.tobytes(), []).append(number)
    found = []
    for row in right:
        known = rows.get(row.tobytes())
        if not known:
            return None
        found.append(known.pop(0))
    return np.asarray(found)


def pattern_of(moved: NDArray[np.int64]) -> str:
    """Say by which regrouping rows moved: ``(a, b, d)`` as ``(b, a, d)``; halves swapped; else nothing."""
    count = len(moved)
    if count % 2 == 0 and np.array_equal(moved, np.roll(np.arange(count), count // 2)):
        return ": the two halves are swapped (gate and up projection)"
    for parts in (2, 3, 4, 8):
        for size in (size for size in range(1, count) if count % (parts * size) == 0):
            outer = count // (parts * size)
            order = np.arange(count).reshape(outer, parts, size)
            if outer > 1 and np.array_equal(moved, order.transpose(1, 0, 2).ravel()):
                return (
                    f": ({outer}, {parts}, {size}) as ({parts}, {outer}, {size}), interleaved by head or not"
                )
            if outer > 1 and np.array_equal(
                moved, order.reshape(parts, outer, size).transpose(1, 0, 2).ravel()
            ):
                return (
                    f": ({parts}, {outer}, {size}) as ({outer}, {parts}, {size}), interleaved by head or not"
                )
    return ""


def _by_elements(one: HostTensor, two: HostTensor) -> tuple[Way, str, bool]:
    left, right = (to_numbers(host).astype(np.float64) for host in (one, two))
    cast = _cast(one, left, two, right)
    if cast:
        return Way.CAST, cast, True
    size = float(np.sum(left * left))
    if size > 0:
        factor = float(np.sum(left * right)) / size
        rest = float(np.linalg.norm(right - factor * left))
        if (
            factor
            and rest <= _ALIKE * float(np.linalg.norm(right))
            and not math.isclose(factor, 1, rel_tol=_ALIKE)
        ):
            return Way.SCALED, f"{factor:.6g} times the baseline's", True
    return _moments(float(np.linalg.norm(left)), float(np.linalg.norm(right)), left.size), "", True


def _cast(one: HostTensor, left: NDArray[Any], two: HostTensor, right: NDArray[Any]) -> str:
    """Return through which dtype one run's weights went, if the other's rounded to it are they."""
    for name in _CASTS:
        for who, values, other in (("candidate", left, right), ("baseline", right, left)):
            rounded = _through(values, name)
            if rounded is not None and np.array_equal(rounded, other) and not np.array_equal(values, other):
                return f"the {who}'s went through {name}"
    same = np.array_equal(left, right) and one.dtype != two.dtype
    return f"the same numbers as {one.dtype} and as {two.dtype}" if same else ""


def _through(values: NDArray[Any], name: str) -> NDArray[Any] | None:
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
        host = HostTensor(bits=to_bits(narrow, name), dtype=name)
        return to_numbers(host).astype(np.float64)


def _moments(one: float, two: float, count: int) -> Way:
    """Tell other random numbers of one spread from another spread: norms of n draws agree to about 1 / √n."""
    if min(one, two) <= 0:
        return Way.SPREAD if one != two else Way.OTHER
    return Way.OTHER if abs(math.log(one / two)) < 6 / math.sqrt(max(count, 1)) else Way.SPREAD


def _by_estimate(left: TensorRecord, right: TensorRecord) -> tuple[Way, str, bool]:
    """Tell by moments and sketches what bits do not: a factor, a rounding, another spread."""
    factor = _factor(left, right)
    if factor is not None:
        return Way.SCALED, f"{factor:.6g} times the baseline's, by its moments", False
    found = estimate(left, right)
    if found is not None:
        for name in ("float32", "float16", "bfloat16"):
            if found.high <= _ROUNDOFF[name]:
                return Way.CAST, f"as far apart as by a rounding to {name} at most (sketch)", False
    one, two = left.digest.statistics, right.digest.statistics
    if one is None or two is None:
        return Way.OTHER, "no moments were recorded", False
    if left.dtype != right.dtype and _near(one, two, max(map(_roundoff, (left.dtype, right.dtype)))):
        return Way.CAST, f"moments agree to a rounding between {left.dtype} and {right.dtype}", False
    return _moments(one.l2_norm, two.l2_norm, left.numel), "", True


def _roundoff(dtype: str) -> float:
    return _ROUNDOFF.get(dtype, 2.0**-4)


def _near(one: Statistics, two: Statistics, roundoff: float) -> bool:
    scale = max(abs(one.maximum), abs(one.minimum))
    moments = ("minimum", "maximum", "mean", "l2_norm")
    return all(
        math.isclose(getattr(one, n), getattr(two, n), rel_tol=roundoff, abs_tol=roundoff * scale)
        for n in moments
    )


def _factor(left: TensorRecord, right: TensorRecord) -> float | None:
    one, two = left.digest.statistics, right.digest.statistics
    if one is None or two is None or one.l2_norm <= 0 or left.numel < 2:
        return None
    factor = two.l2_norm / one.l2_norm
    if math.isclose(factor, 1, rel_tol=_ALIKE) or factor <= 0:
        return None
    for sign in (1, -1):
        low, high = sorted((sign * factor * one.minimum, sign * factor * one.maximum))
        scale = max(abs(low), abs(high))
        near = all(
            math.isclose(a, b, rel_tol=10 * _ALIKE, abs_tol=_ALIKE * scale)
            for a, b in ((low, two.minimum), (high, two.maximum), (sign * factor * one.mean, two.mean))
        )
        if near:
            return sign * factor
    return None
