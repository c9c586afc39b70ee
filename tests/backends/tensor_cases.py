"""Tensors for every framework: numbers as bits, a memory layout and views to take; seeded, in numpy alone.

Each case says the same to numpy, torch and MindSpore: put these bits into memory, take these views. The numpy
view is what all of them must read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

WIDTHS = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 4,
    "complex128": 8,
    "bool": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
}
"""Bytes of an element, of each part where it is complex."""

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
"""MindSpore on a CPU stores these and can take no view of them."""

# zeros, the largest finite number and its neighbours, infinities, quiet and signalling NaNs, subnormals
_SPECIAL = {
    "float16": (0x8000, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFE12, 0x0001),
    "bfloat16": (0x8000, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFC1, 0x0001),
    "float32": (0x80000000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFC12345, 1),
    "float64": (1 << 63, 0x7FEFFFFFFFFFFFFF, 0x7FF << 52, 0xFFF << 52, 0x7FF8 << 48, (0x7FF << 52) | 1, 1),
}
_SPECIAL |= {"complex64": _SPECIAL["float32"], "complex128": _SPECIAL["float64"]}

View = tuple[Any, ...]
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[View, ...]]] = {
    "vector": ((37,), ()),
    "matrix": ((9, 8), ()),
    "four_dimensions": ((3, 2, 5, 4), ()),
    "no_dimension": ((), ()),
    "no_dimension_of_a_matrix": ((4, 5), (("select", 0, 2), ("select", 0, 3))),
    "one_element": ((1, 1, 1), ()),
    "empty": ((0, 5), ()),
    "empty_of_a_matrix": ((6, 5), (("slice", 0, 4, 4, 1), ("permute", (1, 0)))),
    "transposed": ((7, 6), (("permute", (1, 0)),)),
    "permuted": ((3, 4, 5), (("permute", (2, 0, 1)),)),
    "offset": ((8, 6), (("slice", 0, 3, 8, 1),)),
    "columns": ((6, 9), (("slice", 1, 2, 7, 1),)),
    "every_second": ((7, 8), (("slice", 0, 1, 7, 2), ("slice", 1, 0, 8, 3))),
    "expanded": ((1, 6), (("expand", (5, 6)),)),
    "expanded_and_transposed": ((4, 1), (("expand", (4, 7)), ("permute", (1, 0)))),
    "offset_and_permuted": ((4, 5, 6), (("slice", 1, 2, 5, 1), ("permute", (2, 1, 0)))),
}


@dataclass(frozen=True, kw_only=True)
class TensorCase:
    """One tensor, for any framework.

    Attributes:
        name: element type and layout.
        dtype: framework-neutral name of the element type.
        memory: ``[...]`` unsigned integers, C order, before any view; complex elements as two in a further
            last dimension.
        views: views to take in this order: ``("permute", dims)``, ``("slice", dim, start, stop, step)``,
            ``("select", dim, index)``, ``("expand", shape)``.
    """

    name: str
    dtype: str
    memory: np.ndarray
    views: tuple[View, ...]

    @property
    def complex(self) -> bool:
        """Whether an element is two numbers."""
        return self.dtype.startswith("complex")

    def logical(self) -> np.ndarray:
        """Return the bits as any reader must see them, a numpy view with the strides in question."""
        return self.view(self.memory, _numpy_view)

    def view(self, tensor: Any, take: Callable[[Any, View, int], Any]) -> Any:
        """Take the views with ``take(tensor, view, extra)``; ``extra`` dimensions at the end stay."""
        for view in self.views:
            tensor = take(tensor, view, int(self.complex))
        return tensor


def _numpy_view(array: np.ndarray, view: View, extra: int) -> np.ndarray:
    kind, *numbers = view
    if kind == "permute":
        return array.transpose(*numbers[0], *range(array.ndim - extra, array.ndim))
    if kind == "expand":
        return np.broadcast_to(array, (*numbers[0], *array.shape[array.ndim - extra :]))
    if kind == "select":
        return array[(slice(None),) * numbers[0] + (slice(numbers[1], numbers[1] + 1),)].squeeze(numbers[0])
    return array[(slice(None),) * numbers[0] + (slice(*numbers[1:]),)]


def random_bits(random: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return random elements of ``dtype`` as bits: half of them ordinary numbers, half any pattern."""
    width = WIDTHS.get(dtype, 1)
    parts = (*shape, 2) if dtype.startswith("complex") else shape
    count = int(np.prod(parts, dtype=np.int64))
    if dtype == "bool":
        return random.integers(0, 2, parts, dtype=np.uint8)
    bits = np.frombuffer(random.bytes(count * width), dtype=f"u{width}").copy()
    if dtype in _SPECIAL:
        ordinary = random.normal(0, 40, count)
        if dtype == "bfloat16":
            numbers = (ordinary.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        else:
            numbers = ordinary.astype(f"f{width}").view(f"u{width}")
        special = np.resize(np.array(_SPECIAL[dtype], dtype=f"u{width}"), count)
        kind = random.integers(0, 4, count)
        bits = np.select([kind < 2, kind == 2], [numbers, special], bits)
    return bits.reshape(parts)


def tensor_cases(seed: int = 20261129) -> list[TensorCase]:
    """Return the cases: every element type in every layout that it can have; the same in every process."""
    random = np.random.default_rng(seed)
    kinds = [*itertools.product(WIDTHS, LAYOUTS), *itertools.product(FLOAT8, ("vector", "matrix", "empty"))]
    return [
        TensorCase(
            name=f"{dtype}-{layout}",
            dtype=dtype,
            memory=random_bits(random, dtype, LAYOUTS[layout][0]),
            views=LAYOUTS[layout][1],
        )
        for dtype, layout in kinds
    ]
