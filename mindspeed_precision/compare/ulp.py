"""Distance between two tensors in representable values, for the float types of training."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.errors import IncomparableError
from mindspeed_precision.record.elements import to_numbers

_ULP_WIDTH = {"float16": 16, "bfloat16": 16, "float32": 32}


def ulp_distance(baseline: HostTensor, candidate: HostTensor) -> NDArray[np.int64]:
    """Count the representable values between two tensors, element by element.

    Args:
        baseline: ``[...]``, float16, bfloat16 or float32.
        candidate: ``[...]``, same shape and dtype. Never broadcast, never upcast.

    Returns:
        ``[...]`` int64, in ULPs of the common dtype. 0 is equality (``-0.0 == +0.0``, NaN equals NaN);
        -1 marks exactly one NaN.

    Raises:
        IncomparableError: the shapes or the dtypes differ, or the dtype has no ULP here.

    Example:
        >>> one = np.array([1.0, 2.0], np.float32)
        >>> two = np.nextafter(one, np.float32(9))
        >>> ulp_distance(*(HostTensor(bits=x.view(np.uint32), dtype="float32") for x in (one, two)))
        array([1, 1])
    """
    if baseline.dtype != candidate.dtype or baseline.bits.shape != candidate.bits.shape:
        raise IncomparableError(
            "cannot count ULPs between different kinds of tensors",
            found=f"{_kind(baseline)} (baseline) and {_kind(candidate)} (candidate)",
            expected="one shape and one dtype",
        )
    width = _ULP_WIDTH.get(baseline.dtype)
    if width is None:
        raise IncomparableError("no ULP for this dtype", found=baseline.dtype, expected=", ".join(_ULP_WIDTH))
    one, two = _ordered(baseline.bits, width), _ordered(candidate.bits, width)
    nan_one, nan_two = np.isnan(to_numbers(baseline)), np.isnan(to_numbers(candidate))
    distance = np.where(nan_one & nan_two, 0, np.where(nan_one ^ nan_two, -1, np.abs(one - two)))
    return np.asarray(distance, np.int64)


def _ordered(bits: NDArray[Any], width: int) -> NDArray[np.int64]:
    """Map sign-magnitude bits to integers in the order of their values."""
    wide = bits.astype(np.int64)
    magnitude = wide & ((1 << (width - 1)) - 1)
    ordered: NDArray[np.int64] = np.where(wide >> (width - 1), -magnitude, magnitude)
    return ordered


def _kind(tensor: HostTensor) -> str:
    return f"{tensor.dtype}{list(tensor.bits.shape)}"
