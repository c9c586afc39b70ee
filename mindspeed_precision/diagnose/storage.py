"""How a tensor lay in its storage, and what a kernel gets that does not ask.

The law, measured on MindSpore's CPU kernels (``docs/findings.md``): an operand is read from the first element
of its storage as if it were dense in C order, whatever its strides and its offset are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.records import Layout


def may_be_misread(layout: Layout | None) -> bool:
    """Tell whether a kernel that ignores strides and offset reads other elements, or another order."""
    return layout is not None and (not layout.contiguous or layout.storage_offset != 0)


def read_ignoring_layout(values: NDArray[Any], layout: Layout) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return what is read from the first elements of a tensor's storage, in C order.

    Args:
        values: ``[...]``, the tensor's elements where its strides put them.
        layout: how it lay in its storage.

    Returns:
        ``[...]`` of the same shape, and which elements are known: those of the storage that belong to the
        tensor. Of the others (before its offset, between its strides) nothing is recorded; they are zero.
    """
    places: NDArray[np.int64] = np.full(values.shape, layout.storage_offset, np.int64)
    for axis, (size, stride) in enumerate(zip(values.shape, layout.stride, strict=True)):
        along = [1] * values.ndim
        along[axis] = size
        places += (np.arange(size) * stride).reshape(along)
    flat = places.ravel()
    read, known = np.zeros(values.size, values.dtype), np.zeros(values.size, np.bool_)
    inside = flat < values.size
    read[flat[inside]] = values.ravel()[inside]
    known[flat[inside]] = True
    return read.reshape(values.shape), known.reshape(values.shape)
