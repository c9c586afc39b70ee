"""Bit patterns to numbers, in numpy alone: bfloat16 and float8 have no numpy type."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.errors import IncomparableError

UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
"""Relative error of one rounding to nearest, by dtype."""

_NATIVE = {
    "float16": np.float16,
    "float32": np.float32,
    "float64": np.float64,
    "complex64": np.float32,
    "complex128": np.float64,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "uint8": np.uint8,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "uint64": np.uint64,
    "bool": np.uint8,
}
# exponent bits, mantissa bits, exponent bias, whether the top exponent holds infinities
_FLOAT8 = {"float8_e5m2": (5, 2, 15, True), "float8_e4m3fn": (4, 3, 7, False)}


def to_numbers(host: HostTensor) -> NDArray[Any]:
    """Return the elements as numbers of a numpy type that holds every one of them exactly.

    Args:
        host: bits; complex elements as two, real then imaginary, in a last dimension of size 2.

    Returns:
        ``[...]`` of the shape of ``host.bits``; float32 for bfloat16 and float8, else the type itself
        (uint8 for bool, the component's type for complex).

    Raises:
        IncomparableError: the type has no numbers that this function knows.
    """
    if host.dtype == "bfloat16":
        widened: NDArray[np.uint32] = host.bits.astype(np.uint32) << np.uint32(16)
        return widened.view(np.float32)
    if host.dtype in _FLOAT8:
        return np.asarray(_float8_table(host.dtype)[host.bits])
    native = _NATIVE.get(host.dtype)
    if native is None:
        known = ", ".join(sorted([*_NATIVE, *_FLOAT8, "bfloat16"]))
        raise IncomparableError(
            "no numbers for this element type", found=host.dtype, expected=f"one of {known}"
        )
    bits = host.bits.view(np.uint8) if host.bits.dtype == np.bool_ else host.bits
    return np.ascontiguousarray(bits).view(native).reshape(bits.shape)


def width_of(dtype: str) -> int:
    """Return the bytes of an element, by the name of its type: ``bfloat16``, ``float8_e4m3fn``, ``bool``."""
    bits = re.search(r"\d+", dtype)
    return max(int(bits.group()) // 8, 1) if bits else 1


def to_bits(numbers: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Round numbers to an element type, to nearest and ties to even, and return the bits.

    Args:
        numbers: ``[...]`` float32 or float64; float32 for bfloat16, which is rounded from there.
        dtype: ``float16``, ``bfloat16``, ``float32`` or ``float64``.

    Returns:
        ``[...]`` unsigned integers of the type's width.
    """
    if dtype == "bfloat16":
        wide = np.ascontiguousarray(numbers, np.float32).view(np.uint32).reshape(numbers.shape)
        up = np.uint32(0x7FFF) + ((wide >> np.uint32(16)) & np.uint32(1))
        rounded = ((wide + up) >> np.uint32(16)).astype(np.uint16)
        quiet = ((wide >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16)  # a NaN stays one
        chosen: NDArray[np.uint16] = np.where(np.isnan(numbers), quiet, rounded)
        return chosen
    with np.errstate(over="ignore"):
        cast = np.ascontiguousarray(numbers.astype(_NATIVE[dtype]))
    bits: NDArray[Any] = cast.view(f"uint{8 * cast.dtype.itemsize}").reshape(numbers.shape)
    return bits


def _float8_table(dtype: str) -> NDArray[np.float32]:
    exponent_bits, mantissa_bits, bias, has_infinities = _FLOAT8[dtype]
    code = np.arange(256)
    sign = np.where(code & 0x80, -1.0, 1.0)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    normal = np.ldexp(1.0 + fraction, exponent - bias)
    value = sign * np.where(exponent == 0, np.ldexp(fraction, 1 - bias), normal)
    top = exponent == (1 << exponent_bits) - 1
    if has_infinities:
        value = np.where(top & (fraction == 0), sign * np.inf, np.where(top, np.nan, value))
    else:
        value = np.where((code & 0x7F) == 0x7F, np.nan, value)
    return value.astype(np.float32)
