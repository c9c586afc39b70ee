"""One tensor out of a file of ``torch.save``, without torch and without unpickling anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.errors import CheckpointError, DumpError
from mindspeed_precision.torch_archive import MappedFile, TensorReference, TorchArchive
from mindspeed_precision.torch_archive.opcodes import kind_of

_COMPLEX = {"ComplexFloatStorage": "FloatStorage", "ComplexDoubleStorage": "DoubleStorage"}
"""What a complex storage is, taken as twice as many real numbers."""


def read_torch_file(path: Path) -> NDArray[Any]:
    """Return the elements of the tensor in a file, as unsigned integers of their width.

    Args:
        path: a file that holds one tensor.

    Returns:
        ``[...]`` of its shape, in C order; of complex tensors real and imaginary parts in a last dimension.

    Raises:
        DumpError: it is no such file, or its parts do not fit each other.
    """
    try:
        archive = TorchArchive(MappedFile(path))
        tensor = archive.root
        if not isinstance(tensor, TensorReference):
            raise DumpError("not one tensor", where=str(path), found=kind_of(tensor))
        tensor = _as_pairs(tensor)
        if not archive.dtype(tensor):
            found = str(tensor.storage.kind)[:120]
            raise DumpError("a storage of an unknown kind", where=str(path), found=found)
        elements = archive.elements(tensor)
    except CheckpointError as error:
        raise DumpError(error.what, where=error.where, found=error.found, expected=error.expected) from error
    return np.ascontiguousarray(elements).reshape(elements.shape)


def _as_pairs(tensor: TensorReference) -> TensorReference:
    """Return a complex tensor as one of real and imaginary parts; any other as it is."""
    kind = _COMPLEX.get(tensor.storage.kind)
    if kind is None:
        return tensor
    return replace(
        tensor,
        storage=replace(tensor.storage, kind=kind),
        offset=2 * tensor.offset,
        shape=(*tensor.shape, 2),
        stride=(*(2 * step for step in tensor.stride), 1),
    )


__all__ = ["read_torch_file"]
