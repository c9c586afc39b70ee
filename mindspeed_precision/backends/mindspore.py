"""The MindSpore backend: tensors of MindSpore itself, and of a ``torch`` that is MindSpore underneath.

MSAdapter and mindtorch put torch's API on ``mindspore.Tensor``: the class, its element types and its memory
are MindSpore's own, so one backend reads both.

A digest is taken on the host, by the definition in ``record``, at the moment when the tensor is seen:
``asnumpy`` waits for the tensor. Debugging runs with ``mindspore.runtime.launch_blocking``, where every
operator has ended before the next line of Python runs, so this adds no further waiting. (Switched on after
the first operator it does nothing, in silence: then an error of an earlier operator can surface here.)

On an accelerator this costs one copy to the host for each tensor. To digest there instead, as
``torch_fingerprint`` does in lanes of 32 bits, a device needs kernels for a view of the bits as integers, and
for int32 shifts, multiplication and sums; none of this was tried on Ascend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore._c_expression import TensorPy

from mindspeed_precision.backends.base import Form, HostTensor
from mindspeed_precision.backends.digest_kernel import digest_on_host
from mindspeed_precision.errors import PrecisionError
from mindspeed_precision.records import Digest, Layout, Part

_BITS_ONLY = ("hifloat8",)
"""Element types whose numbers ``record.elements`` does not know: they get fingerprints, no statistics."""


def _names() -> dict[Any, str]:
    floating = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", *_BITS_ONLY]
    integers = [f"{sign}int{width}" for sign in ("", "u") for width in (8, 16, 32, 64)]
    names = {mindspore.bool_: "bool"}
    for name in [*floating, *integers, "complex64", "complex128"]:
        dtype = getattr(mindspore, name, None)  # older builds lack the newer types
        if dtype is not None:
            names[dtype] = name
    return names


# By the type itself: its text is 'Float32', and 'mindspore.float32' once mindtorch is imported.
_NAMES = _names()


class MindSporeBackend:
    """Implements ``backends.base.Backend`` for MindSpore.

    Handles and snapshots are finished results on the host: no later write to a tensor reaches them. Reading
    enters nothing into the tape and draws from no random generator.
    """

    name = "mindspore"

    def is_tensor(self, value: object) -> bool:
        """Tell whether ``value`` is a dense MindSpore tensor (a ``Parameter`` is one)."""
        return isinstance(value, mindspore.Tensor)

    def shape(self, tensor: Any) -> tuple[int, ...]:
        """Return the logical shape."""
        return tuple(int(size) for size in tensor.shape)

    def dtype(self, tensor: Any) -> str:
        """Return the framework-neutral name of the element type."""
        return _NAMES.get(tensor.dtype, str(tensor.dtype).lower())

    def layout(self, tensor: Any) -> Layout:
        """Return strides, offset and contiguity; MindSpore does not tell Python a storage format."""
        return Layout(
            stride=tuple(int(step) for step in tensor.stride()),
            storage_offset=int(tensor.storage_offset()),
            contiguous=bool(tensor.is_contiguous()),
        )

    def form(self, tensor: Any) -> Form:
        """Return shape, element type and layout."""
        return Form(shape=self.shape(tensor), dtype=self.dtype(tensor), layout=self.layout(tensor))

    def begin_digest(self, tensor: Any, *, statistics: bool, sketch: bool = False) -> Digest:
        """Return the digest, which is finished: see the module's docstring.

        Raises:
            PrecisionError: the tensor cannot be read as dense elements of a known type.
        """
        host = self.snapshot(tensor)
        numbers = host.dtype not in _BITS_ONLY
        return digest_on_host(host, statistics=statistics and numbers, sketch=sketch and numbers)

    def begin_placed_digest(
        self, tensor: Any, part: Part, *, statistics: bool, sketch: bool = False
    ) -> Digest:
        """Return the digest of a part of a canonical tensor, with its elements numbered as they are there.

        Raises:
            PrecisionError: as ``begin_digest``; or the tensor does not have the part's number of elements.
        """
        host = self.snapshot(tensor)
        if host.bits.size != part.stop - part.start:
            raise PrecisionError(
                "not the part of the parameter that it should be",
                found=f"{host.bits.size} of {host.dtype}",
                expected=f"{part.stop - part.start} real numbers",
            )
        numbers = host.dtype not in _BITS_ONLY
        return digest_on_host(host, statistics=statistics and numbers, sketch=sketch and numbers, part=part)

    def finish_digests(self, handles: Sequence[Digest]) -> list[Digest]:
        """Return the digests; there is nothing left to wait for."""
        return list(handles)

    def snapshot(self, tensor: Any) -> HostTensor:
        """Copy a tensor to the host, in C order.

        Raises:
            PrecisionError: the tensor cannot be read as dense elements of a known type.
        """
        _check_readable(tensor)
        try:
            alias = tensor.asnumpy()
        except (RuntimeError, TypeError, ValueError) as error:
            failed = _unreadable(tensor, " ".join(str(error).split()))
            failed.remedy = "without launch_blocking, look at the operators before: it may be their error"
            raise failed from error
        if alias.dtype.kind == "V":  # bfloat16 and float8; numpy cannot copy the latter: it gives old memory
            alias = alias.view(f"u{alias.dtype.itemsize}")
        # on a CPU asnumpy shares the tensor's memory: an optimizer's step would be seen through it
        array = np.array(alias, order="C", copy=True)
        if array.dtype.kind == "c":
            array = array.reshape((*array.shape, 1)).view(array.real.dtype)
        return HostTensor(bits=array.view(f"u{array.dtype.itemsize}"), dtype=self.dtype(tensor))

    def to_host(self, snapshot: HostTensor) -> HostTensor:
        """Return a snapshot, which is on the host."""
        return snapshot


def _check_readable(tensor: Any) -> None:
    """Refuse a tensor whose elements ``asnumpy`` would make up or change.

    It reads freed memory, gives zeros for a tensor without memory (device ``meta``), and draws the initial
    values of a parameter that has none yet from the random generator.
    """
    if not isinstance(tensor, mindspore.Tensor):
        raise _unreadable(tensor, type(tensor).__name__)
    if tensor.dtype not in _NAMES:
        raise PrecisionError("no way to take a fingerprint of this element type", found=str(tensor.dtype))
    device = getattr(tensor, "device", "")  # text in MindSpore, an object in mindtorch
    if getattr(device, "type", device) == "meta":
        raise _unreadable(tensor, "a tensor on device meta, which has no elements")
    if tensor.has_init:
        raise _unreadable(tensor, "a parameter without values; call init_data() on it, or run its cell once")
    # TensorPy's, because the method of mindtorch wraps a copy
    if math.prod(tensor.shape) and not TensorPy.untyped_storage(tensor).nbytes():
        where = _name_of(tensor)
        raise PrecisionError("the memory of this tensor was freed before it could be read", where=where)


def _unreadable(tensor: Any, found: str) -> PrecisionError:
    return PrecisionError(
        "cannot read the elements of this tensor",
        where=_name_of(tensor),
        found=found,
        expected="a dense tensor",
    )


def _name_of(tensor: Any) -> str:
    return str(getattr(tensor, "name", ""))  # only a Parameter has one
