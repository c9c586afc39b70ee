"""What a record must hold, and how far what it holds is from that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mindspeed_precision.record.freivalds import TF32, growth
from mindspeed_precision.records import TensorRecord
from mindspeed_precision.verify.elements import Vector, roundoff
from mindspeed_precision.verify.run_facts import RunFacts

ACCUMULATOR = roundoff("float32")
"""Unit roundoff of the type in which a kernel is taken to sum."""

ROOM = 2.0
"""What bounds are multiplied by: other orders of operations than those that they were derived for."""

TINY = 1e-37
"""Below the smallest normal float32: kernels may flush there."""


def underflow(dtype: str) -> float:
    """Return what a rounding leaves of the smallest numbers of a dtype: half the spacing of subnormals."""
    return {"float16": 2.0**-25, "float8_e4m3fn": 2.0**-10, "float8_e5m2": 2.0**-17}.get(dtype, 0.0)


@dataclass(frozen=True, kw_only=True)
class Exact:
    """What a record must hold.

    Attributes:
        record: what was recorded.
        numbers: the exact numbers, of the record's shape.
        allowed: how far rounding may leave each of them, of the same shape, or one number.
        of: what they were computed from, in a phrase.
    """

    record: TensorRecord
    numbers: Vector
    allowed: Vector
    of: str


@dataclass(frozen=True, kw_only=True)
class Left:
    """A record that was not computed anew.

    Attributes:
        what: the kind of module.
        why: in a phrase.
    """

    what: str
    why: str


Found = Iterator[Exact | Left]


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How far a record is from what it must hold.

    Attributes:
        ratio: the largest error over what is allowed there; above 1 it is another number.
        wrong: how many elements are off by more than is allowed.
        total: of how many.
        relative: norm of the difference over the norm of the exact numbers.
        factor: the multiple of the exact numbers that was found instead; None: it is none.
    """

    ratio: float
    wrong: int
    total: int
    relative: float
    factor: float | None

    @property
    def text(self) -> str:
        """In a phrase, with numbers."""
        return (
            f"{self.wrong} of {self.total} elements are off by more than rounding explains, the worst by "
            f"{self.ratio:.3g} times that; relative {self.relative:.2e}"
        )


def distance(found: Vector, exact: Exact) -> Distance:
    """Compare what was recorded with what must be there.

    Args:
        found: elements of the record.
        exact: of the same number of elements.
    """
    numbers = exact.numbers.reshape(found.shape)
    allowed = np.broadcast_to(exact.allowed, exact.numbers.shape).reshape(found.shape) * ROOM
    allowed = allowed + TINY + (2 * underflow(exact.record.dtype) if np.any(exact.allowed) else 0.0)
    error = np.abs(found - numbers)
    ratio = np.where(error > 0, error / allowed, 0.0)
    size = float(np.linalg.norm(numbers))
    off = float(np.linalg.norm(error))
    square = size * size
    factor = float(np.vdot(numbers, found)) / square if square else 0.0
    rest = float(np.linalg.norm(found - factor * numbers))
    multiple = abs(factor - 1) > 1e-6 and rest <= max(1e-2 * off, 1e-6 * size)
    return Distance(
        ratio=float(ratio.max(initial=0.0)),
        wrong=int((ratio > 1).sum()),
        total=found.size,
        relative=off / size if size else float("inf"),
        factor=factor if multiple else None,
    )


def summed(facts: RunFacts, terms: int) -> float:
    """Return by how much a sum of products may be off, relative to the sum of the sizes of its terms."""
    numerics = facts.run.manifest.get("numerics")
    precise = (
        not isinstance(numerics, dict) or numerics.get("float32_matmul_precision", "highest") == "highest"
    )
    return growth(max(terms, 1), ACCUMULATOR) + (0.0 if precise else 2 * TF32)
