"""Sums over the elements of two tensors, gathered a piece at a time: how far they are apart, and where."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.ckpt.stored import Bits
from mindspeed_precision.record.elements import to_bits, to_numbers

PIECE = 1 << 22
"""Elements that are widened at a time: a piece takes a few times 32 MiB."""

_NARROW = {
    "float64": ("float32", "bfloat16", "float16"),
    "float32": ("bfloat16", "float16"),
    "float16": (),
    "bfloat16": (),
}
_ALIKE = 1e-5


def as_rows(bits: Bits) -> Bits:
    """Return elements as ``[rows, elements of a row]``; a view where that is possible."""
    return bits.reshape(bits.shape[0], -1) if bits.ndim else bits.reshape(1, 1)


def pieces(one: Bits, two: Bits) -> Iterator[tuple[Bits, Bits]]:
    """Yield both tensors by whole rows, ``[rows, elements of a row]`` each, of one shape."""
    if not one.size:
        return
    count = one.shape[0] if one.ndim else 1
    step = max(1, PIECE // max(1, one.size // count))
    if one.ndim == 0:
        yield one.reshape(1, 1), two.reshape(1, 1)
        return
    for start in range(0, count, step):
        yield as_rows(one[start : start + step]), as_rows(two[start : start + step])


def numbers(bits: Bits, kind: str) -> NDArray[np.float64]:
    """Return elements as float64, ``[...]``; integers of 64 bits are rounded to it."""
    found: NDArray[np.float64] = to_numbers(HostTensor(bits=np.ascontiguousarray(bits), dtype=kind)).astype(
        np.float64
    )
    return found


def rounded(values: NDArray[np.float64], kind: str) -> Bits:
    """Return numbers as the bits of a floating type: to bfloat16 by way of float32."""
    with np.errstate(over="ignore"):
        return to_bits(values.astype(np.float32) if kind != "float64" else values, kind)


@dataclass(kw_only=True)
class Sums:
    """What is gathered of two tensors.

    Attributes:
        kinds: the element types.
    """

    kinds: tuple[str, str]
    _one: float = 0.0
    _two: float = 0.0
    _both: float = 0.0
    _apart: float = 0.0
    _largest: float = 0.0
    _mismatched: int = 0
    _nonfinite: int = 0
    _elements: int = 0
    _casts: dict[tuple[int, str], bool] = field(default_factory=dict)
    _row_errors: list[NDArray[np.float64]] = field(default_factory=list)
    _row_sizes: list[NDArray[np.float64]] = field(default_factory=list)

    def __post_init__(self) -> None:
        same = self.kinds[0] == self.kinds[1]
        for kind in _NARROW.get(self.kinds[0], ()) if same else ():
            self._casts.update({(side, kind): True for side in (0, 1)})

    def add(self, one: Bits, two: Bits) -> None:
        """Add a piece, ``[rows, elements of a row]`` of both."""
        left, right = numbers(one, self.kinds[0]), numbers(two, self.kinds[1])
        unequal = (one != two) if self.kinds[0] == self.kinds[1] else (left != right)
        finite = np.isfinite(left) & np.isfinite(right)
        self._nonfinite += int(np.count_nonzero(unequal & ~finite))
        for (side, kind), so_far in self._casts.items():
            if so_far:
                wide, narrow = (left, right) if side else (right, left)
                through = numbers(rounded(wide, kind), kind)
                self._casts[side, kind] = bool(np.array_equal(through, narrow, equal_nan=True))
        a, b = np.where(finite, left, 0.0), np.where(finite, right, 0.0)
        error = b - a
        self._one += float(np.sum(a * a))
        self._two += float(np.sum(b * b))
        self._both += float(np.sum(a * b))
        self._apart += float(np.sum(error * error))
        self._largest = max(self._largest, float(np.max(np.abs(error), initial=0.0)))
        self._mismatched += int(np.count_nonzero(unequal))
        self._elements += one.size
        errors = np.sqrt(np.sum(error * error, axis=1))
        errors[np.any(unequal & ~finite, axis=1)] = np.inf
        errors[(errors == 0) & np.any(unequal, axis=1)] = np.finfo(np.float64).tiny  # -0.0 against 0.0
        self._row_errors.append(errors)
        self._row_sizes.append(np.sqrt(np.sum(a * a, axis=1)))

    def cast(self) -> str:
        """Return through which type one side went, if that is all that happened."""
        for (side, kind), holds in self._casts.items():
            if holds:
                return f"the {'candidate' if side else 'baseline'}'s went through {kind}"
        return ""

    def factor(self) -> float | None:
        """Return the factor that the candidate may be of the baseline, if both point the same way."""
        if not self._one or not self._two or self._nonfinite:
            return None
        if self._both**2 < (1 - 1e-4) * self._one * self._two:
            return None
        found = self._both / self._one
        return None if math.isclose(found, 1, rel_tol=_ALIKE) else found

    def other_spread(self) -> bool:
        """Tell numbers of another spread from others of one: norms of n draws agree to about 1 / √n."""
        if 2 * self._mismatched < self._elements:
            return False
        if min(self._one, self._two) <= 0:
            return self._one != self._two
        cosine = self._both / math.sqrt(self._one * self._two)
        apart = abs(math.log(self._one / self._two)) / 2
        return cosine < 0.5 and apart >= 6 / math.sqrt(max(self._elements, 1))

    def metrics(self) -> dict[str, float | int]:
        """Return how far the candidate is from the baseline: infinitely where one of them is not finite."""
        found: dict[str, float | int] = {
            "max_abs": self._largest,
            "rel_frobenius": math.sqrt(self._apart / self._one) if self._one else math.inf,
            "mismatched": self._mismatched,
            "elements": self._elements,
        }
        if self._nonfinite:
            finite = {f"finite_{name}": found[name] for name in ("max_abs", "rel_frobenius")}
            found |= {**finite, "max_abs": math.inf, "rel_frobenius": math.inf, "nonfinite": self._nonfinite}
        elif self._one and self._two:
            found["cosine"] = self._both / math.sqrt(self._one * self._two)
        errors, sizes = np.concatenate(self._row_errors), np.concatenate(self._row_sizes)
        worst = int(np.argmax(errors))
        found["worst_row"] = worst
        found["worst_row_error"] = float(errors[worst] / sizes[worst]) if sizes[worst] else math.inf
        found["rows"] = len(errors)
        return found

    def rows(self) -> tuple[int, ...]:
        """Return the numbers of the rows that differ."""
        return tuple(int(row) for row in np.flatnonzero(np.concatenate(self._row_errors)))


__all__ = ["Sums", "as_rows", "numbers", "pieces", "rounded"]
