"""Two tensors of one name: the same, the same after something, or different; read a piece at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from mindspeed_precision.ckpt.conventions import row_orders
from mindspeed_precision.ckpt.stored import Bits, Geometry, Stored
from mindspeed_precision.ckpt.sums import Sums, as_rows, numbers, pieces, rounded
from mindspeed_precision.record.elements import UNIT_ROUNDOFF
from mindspeed_precision.record.fingerprint import fingerprints
from mindspeed_precision.record.placement import of_vocabulary
from mindspeed_precision.record.statistics import digest_host
from mindspeed_precision.records import INIT_STEP, Phase, RecordKey, Role, TensorRecord
from mindspeed_precision.verify.pair.weight_pairs import Way, moved_rows, pattern_of, told_by_digest

_SAMPLED = 4
_ALIKE = 1e-5
"""Relative distance below which a scaled tensor counts as the other's multiple (roundings of float32)."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """What was found about two tensors.

    Attributes:
        way: how they differ; ``SAME`` where they do not.
        steps: what makes them the same, by the way that each is; empty for bits that are equal as they are.
        detail: facts in one phrase.
        metrics: of tensors that differ: ``max_abs``, ``rel_frobenius``, ``cosine``, ``mismatched``,
            ``elements``, ``worst_row``.
        rows: numbers of the rows that differ, ascending.
    """

    way: Way
    steps: Mapping[Way | str, str] = field(default_factory=dict)
    detail: str = ""
    metrics: Mapping[str, float | int] = field(default_factory=dict)
    rows: tuple[int, ...] = ()

    @property
    def same(self) -> bool:
        """Whether nothing but the steps tells them apart."""
        return self.way is Way.SAME


PADDED = "padded"
RESHAPED = "reshaped"


def tell(name: str, one: Stored, two: Stored, *, geometry: Geometry) -> Told:
    """Return how two tensors of one name differ.

    Raises:
        CheckpointError: a file does not hold what it says.
        DumpError: elements that a run kept cannot be read.
    """
    if one.load is None or two.load is None:
        return _by_digest(one, two)
    left, right = one.bits(), two.bits()
    steps: dict[Way | str, str] = {}
    if left.shape != right.shape:
        fitted = _fitted(name, left, right, steps)
        if fitted is None:
            same_count = "; the same number of elements" if left.size == right.size else ""
            shapes = f"{list(left.shape)} in the baseline, {list(right.shape)} in the candidate{same_count}"
            return Told(way=Way.SHAPE, detail=shapes)
        left, right = fitted
    if one.dtype != two.dtype:
        steps[Way.CAST] = f"{one.dtype} against {two.dtype}"
    pair = _Pair(left=left, right=right, kinds=(one.dtype, two.dtype))
    if pair.equal():
        return Told(way=Way.SAME, steps=steps)
    moved = _moved(name, pair, geometry)
    if moved is not None:
        way, words = moved
        return Told(way=Way.SAME, steps={**steps, way: words})
    return _numbers_differ(pair, steps)


def _fitted(name: str, left: Bits, right: Bits, steps: dict[Way | str, str]) -> tuple[Bits, Bits] | None:
    """Bring two shapes together: a vocabulary without its padding, a transpose, dimensions of one."""
    if [size for size in left.shape if size != 1] == [size for size in right.shape if size != 1]:
        steps[RESHAPED] = f"{list(left.shape)} against {list(right.shape)}"
        return left, right.reshape(left.shape)
    if left.ndim == 2 and left.shape == right.shape[::-1]:
        steps[Way.TRANSPOSED] = f"{list(left.shape)} against {list(right.shape)}"
        return left, right.T
    if of_vocabulary(name) and left.ndim == right.ndim and left.shape[1:] == right.shape[1:]:
        rows = min(left.shape[0], right.shape[0])
        steps[PADDED] = f"{left.shape[0]} rows against {right.shape[0]}"
        return left[:rows], right[:rows]
    return None


@dataclass(frozen=True, kw_only=True)
class _Pair:
    left: Bits
    right: Bits
    kinds: tuple[str, str]

    @property
    def floating(self) -> bool:
        return all(kind.startswith(("float", "bfloat")) for kind in self.kinds)

    def equal(self, left: Bits | None = None, right: Bits | None = None) -> bool:
        """Tell whether the bits are the same; of two types, whether one is the other rounded."""
        mine = self.left if left is None else left
        other = self.right if right is None else right
        return all(_same(a, self.kinds[0], b, self.kinds[1]) for a, b in pieces(mine, other))

    def pieces(self) -> Iterator[tuple[Bits, Bits]]:
        return pieces(self.left, self.right)


def _same(one: Bits, kind: str, two: Bits, other: str) -> bool:
    if kind == other:
        return bool(np.array_equal(one, two))
    if one.dtype.itemsize > two.dtype.itemsize and other in UNIT_ROUNDOFF:
        return bool(np.array_equal(rounded(numbers(one, kind), other), two))
    if two.dtype.itemsize > one.dtype.itemsize and kind in UNIT_ROUNDOFF:
        return bool(np.array_equal(rounded(numbers(two, other), kind), one))
    return bool(np.array_equal(numbers(one, kind), numbers(two, other)))


def _moved(name: str, pair: _Pair, geometry: Geometry) -> tuple[Way, str] | None:
    """Tell whether the candidate has the baseline's elements in another order, and in which."""
    left, right = pair.left, pair.right
    if left.ndim == 2 and left.shape[0] == left.shape[1] and pair.equal(left.T):
        return Way.TRANSPOSED, "square, and the other's transpose"
    rows = left.shape[0] if left.ndim else 0
    for words, order in row_orders(name, rows, geometry):
        sample = np.unique(np.linspace(0, rows - 1, _SAMPLED).astype(np.int64))
        if pair.equal(left[order[sample]], right[sample]) and pair.equal(left[order]):
            return Way.PERMUTED, words
    if pair.kinds[0] != pair.kinds[1] or left.ndim == 0:
        return None
    if fingerprints(np.ascontiguousarray(left))[1] != fingerprints(np.ascontiguousarray(right))[1]:
        return None
    found = moved_rows(as_rows(left), as_rows(right))
    if found is None:
        return Way.PERMUTED, "the same elements in another order, not by whole rows"
    return Way.PERMUTED, f"rows are permuted{pattern_of(found)}"


def _numbers_differ(pair: _Pair, steps: dict[Way | str, str]) -> Told:
    sums = Sums(kinds=pair.kinds)
    for left, right in pair.pieces():
        sums.add(left, right)
    cast = sums.cast()
    if cast:
        return Told(way=Way.SAME, steps={**steps, Way.CAST: cast})
    factor = sums.factor()
    if factor is not None and pair.floating and _is_multiple(pair, factor):
        return Told(way=Way.SAME, steps={**steps, Way.SCALED: f"{factor:.6g} times the baseline's"})
    metrics = sums.metrics()
    detail = ", ".join(f"{words}" for words in steps.values())
    way = Way.SPREAD if sums.other_spread() else Way.OTHER
    return Told(way=way, detail=detail, metrics=metrics, rows=sums.rows())


def _is_multiple(pair: _Pair, factor: float) -> bool:
    rest = size = 0.0
    for left, right in pair.pieces():
        a, b = numbers(left, pair.kinds[0]), numbers(right, pair.kinds[1])
        rest += float(np.sum((b - factor * a) ** 2))
        size += float(np.sum(b * b))
    roundoff = max(_ALIKE, *(UNIT_ROUNDOFF.get(kind, 0.0) for kind in pair.kinds))
    return math.sqrt(rest) <= roundoff * math.sqrt(size)


def _by_digest(one: Stored, two: Stored) -> Told:
    """Tell two tensors apart of which one was recorded without its elements."""
    left, right = (_digested(side) for side in (one, two))
    if left.shape != right.shape:
        return Told(
            way=Way.SHAPE, detail=f"{list(left.shape)} in the baseline, {list(right.shape)} in the candidate"
        )
    way, detail = told_by_digest(left, right)
    if way is Way.SAME:
        return Told(way=way, detail="by fingerprint")
    if way in (Way.CAST, Way.SCALED, Way.PERMUTED, Way.TRANSPOSED):
        return Told(
            way=Way.SAME, steps={way: detail or "by moments"}, detail="estimated, no elements were kept"
        )
    return Told(way=way, detail=(detail or "other bits") + "; no elements were kept, so not by how much")


def _digested(side: Stored) -> TensorRecord:
    """Return the record of a tensor, digested from its elements where it comes from no run."""
    if side.record is not None:
        return side.record
    key = RecordKey(step=INIT_STEP, phase=Phase.INIT, fqn=side.name, role=Role.PARAM)
    digest = digest_host(side.host(), statistics=True, sketch=True)
    return TensorRecord(seq=0, key=key, shape=side.shape, dtype=side.dtype, layout=None, digest=digest)


__all__ = ["PADDED", "RESHAPED", "Told", "tell"]
