"""Make the tensor of a case in torch, in MindSpore, or in MindSpore through torch's API.

As a program, ``python tensor_making.py FRAMEWORK OUT.json`` writes what this package's backend reads of every
case, for another process to compare: one environment cannot hold torch and MindSpore.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tensor_cases import FLOAT8, TensorCase, View, tensor_cases

from mindspeed_precision.backends import load_backend


def torch_tensor(case: TensorCase) -> Any:
    """Return the tensor of ``case`` in real torch."""
    import torch

    memory = torch.from_numpy(case.memory.view(f"i{case.memory.itemsize}"))
    if case.complex:
        part = torch.float32 if case.dtype == "complex64" else torch.float64
        tensor = torch.view_as_complex(memory.view(part))
    else:
        tensor = memory.view(getattr(torch, case.dtype))
    return case.view(tensor, _view)


def mindspore_tensor(case: TensorCase) -> Any:
    """Return the tensor of ``case`` in MindSpore."""
    import mindspore

    bits = case.memory
    if case.dtype in FLOAT8:
        tensor = mindspore.Tensor(np.zeros(bits.shape, np.float32), getattr(mindspore, case.dtype))
        # no array of float8 is accepted; but the array that it gives shares its memory
        tensor.asnumpy().view(np.uint8)[...] = bits
        return tensor
    if case.dtype == "bfloat16":
        element = mindspore.Tensor(1.0, mindspore.bfloat16).asnumpy().dtype
    else:
        element = np.dtype(case.dtype)
    array = bits.view(element)
    return case.view(mindspore.Tensor(array[..., 0] if case.complex else array), _view)


def _view(tensor: Any, view: View, _: int) -> Any:
    kind, *numbers = view
    if kind == "permute":
        return tensor.permute(*numbers[0])
    if kind == "expand":
        return tensor.broadcast_to(numbers[0])
    if kind == "select":
        return tensor[(slice(None),) * numbers[0] + (numbers[1],)]
    return tensor[(slice(None),) * numbers[0] + (slice(*numbers[1:]),)]


def _mindtorch_tensor(case: TensorCase) -> Any:
    """Return the tensor of ``case`` in MindSpore, its views taken by the ``torch`` of mindtorch."""
    import mindtorch  # noqa: F401  it puts itself in torch's place
    import torch

    assert torch.Tensor.__mro__[0].__module__.startswith("mindspore"), torch.__file__
    return mindspore_tensor(case)


FRAMEWORKS: dict[str, tuple[str, Callable[[TensorCase], Any]]] = {
    "torch": ("torch", torch_tensor),
    "mindspore": ("mindspore", mindspore_tensor),
    "mindtorch": ("mindspore", _mindtorch_tensor),
}
"""Backend that reads, and how a tensor is made."""


def read_cases(framework: str) -> dict[str, dict[str, Any]]:
    """Return what the backend reads of every case, by name, ready for JSON; NaN becomes None."""
    name, make = FRAMEWORKS[framework]
    return {case.name: reading(load_backend(name), make(case)) for case in tensor_cases()}


def reading(backend: Any, tensor: Any) -> dict[str, Any]:
    """Return everything that ``backend`` tells about ``tensor``."""
    layout = backend.layout(tensor)
    (digest,) = backend.finish_digests([backend.begin_digest(tensor, statistics=True)])
    moments = {name: getattr(digest.statistics, name) for name in ("minimum", "maximum", "mean", "l2_norm")}
    counts = {name: getattr(digest.statistics, name) for name in ("zeros", "nans", "infs")}
    return {
        "dtype": backend.dtype(tensor),
        "shape": list(backend.shape(tensor)),
        "layout": [list(layout.stride), layout.storage_offset, layout.contiguous],
        "fingerprint": digest.fingerprint,
        "unordered": digest.unordered,
        "counts": counts | {str(k): n for k, n in sorted(digest.statistics.exponents.items())},
        "moments": {name: None if value != value else value for name, value in moments.items()},
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(read_cases(sys.argv[1])))
    # MindSpore now and then aborts while the interpreter ends; all is written
    os._exit(0)
