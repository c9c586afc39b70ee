"""How the compiled kernel reads tensors: element types, and which elements lie where in memory."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.record.placement import runs_of
from mindspeed_precision.records import Part

BY_TABLE, BITS_ONLY = 5, 0
MAX_DIMS = 64

WORTH_LOOKING_UP = 1 << 12
"""Bytes of a tensor."""

Identity = tuple[int, int, int, bytes, bytes]
"""What two geometries that read the same memory in the same way have in common."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How the kernel reads one element type.

    Attributes:
        kind: ``enum kind`` of the C source.
        width: bytes per element.
        table: ``[256]`` float32 numbers of one-byte elements; else None.
        floating: whether tensors may have a sketch.
    """

    kind: int
    width: int
    table: NDArray[np.float32] | None = None
    floating: bool = True


KINDS = {
    "float32": Reading(kind=1, width=4),
    "bfloat16": Reading(kind=2, width=2),
    "float16": Reading(kind=3, width=2),
    "float64": Reading(kind=4, width=8),
    "int16": Reading(kind=6, floating=False, width=2),
    "uint16": Reading(kind=7, floating=False, width=2),
    "int32": Reading(kind=8, floating=False, width=4),
    "uint32": Reading(kind=9, floating=False, width=4),
    "int64": Reading(kind=10, floating=False, width=8),
    "uint64": Reading(kind=11, floating=False, width=8),
}
"""Types whose numbers C knows; those of one byte are read through a table, others as bits alone."""


class _Tensor(ctypes.Structure):
    """``struct tensor`` of the C source."""

    _fields_ = (
        ("dims", ctypes.c_int64),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("table", ctypes.c_void_p),
        ("runs", ctypes.c_int64),
        ("starts", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
    )


class Geometry:
    """Which elements a tensor has and where they lie; made once for all tensors that are alike.

    Args:
        shape: logical shape, 64 dimensions at most.
        strides: in elements, as many; any sign, zero included.
        reading: how to read an element.
        runs: ``record.placement.runs_of`` what the tensor holds of a canonical one; None: it is whole.

    Attributes:
        numel: elements (two per complex element).
        reading: as given.
        identity: equal for geometries of the same elements that are one in memory, whatever their shape;
            None: they are not one, or few.
    """

    def __init__(
        self,
        shape: Sequence[int],
        strides: Sequence[int],
        reading: Reading,
        *,
        runs: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None,
    ) -> None:
        self.numel, self.reading = math.prod(shape), reading
        whole = np.zeros(1, np.int64), np.array([self.numel], np.int64)
        starts, lengths = (np.ascontiguousarray(one, np.int64) for one in runs or whole)
        assert len(starts) == len(lengths)
        assert int(lengths.sum()) == self.numel
        self.identity: Identity | None = None
        if self.numel * reading.width >= WORTH_LOOKING_UP and _one_in_memory(shape, strides):
            table = b"" if reading.table is None else reading.table.tobytes()
            placed = b"" if runs is None else starts.tobytes() + lengths.tobytes()
            self.identity = self.numel, reading.kind, reading.width, table, placed
        places = np.array([*shape, *strides], np.int64)
        self._kept = places, starts, lengths, reading.table
        self._plain = _Tensor(
            dims=len(shape),
            shape=places.ctypes.data,
            strides=places.ctypes.data + len(shape) * places.itemsize,
            width=reading.width,
            kind=reading.kind,
            table=None if reading.table is None else reading.table.ctypes.data,
            runs=len(starts),
            starts=starts.ctypes.data,
            lengths=lengths.ctypes.data,
        )
        self.address = ctypes.addressof(self._plain)


def _one_in_memory(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Tell whether elements in C order are consecutive in memory."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def geometry_of(bits: NDArray[Any], reading: Reading, part: Part | None = None) -> Geometry:
    """Return the geometry of an array.

    Args:
        bits: ``[...]`` unsigned integers of the elements' width.
        reading: how to read an element.
        part: what it holds of a canonical tensor; None: it is whole.
    """
    strides = [stride // reading.width for stride in bits.strides]
    return Geometry(bits.shape, strides, reading, runs=None if part is None else runs_of(part))


def reading_of(name: str, *, width: int, numbers: NDArray[np.float32] | None, floating: bool) -> Reading:
    """Return how the kernel reads an element type.

    Args:
        name: framework-neutral name.
        width: bytes per element.
        numbers: ``[256]`` of all codes, for types of one byte; None where they have none.
        floating: whether tensors of the type may have a sketch.
    """
    if name in KINDS:
        return KINDS[name]
    if width == 1 and numbers is not None:
        return Reading(
            kind=BY_TABLE, width=1, table=np.ascontiguousarray(numbers, np.float32), floating=floating
        )
    return Reading(kind=BITS_ONLY, width=width, floating=False)
