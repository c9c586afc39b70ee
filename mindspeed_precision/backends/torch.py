"""The torch backend: cpu, cuda and npu tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mindspeed_precision.backends.base import Form, HostTensor
from mindspeed_precision.backends.digest_geometry import MAX_DIMS, Geometry, Reading, reading_of
from mindspeed_precision.backends.digest_kernel import digest_kernel
from mindspeed_precision.backends.host_digests import HostDigest, HostDigests
from mindspeed_precision.backends.torch_digest import ELEMENTS, Sums, element_of, require_part, sums_of
from mindspeed_precision.errors import PrecisionError
from mindspeed_precision.record.placement import runs_of
from mindspeed_precision.record.sketch import BUCKETS, ROUNDOFF, SINGLE_ROUNDOFF, pack
from mindspeed_precision.record.statistics import EMPTY, statistics_from
from mindspeed_precision.records import Digest, Layout, Part, Sketch

_NPU_FORMATS = {-1: "", 0: "NCHW", 2: "ND", 3: "NC1HWC0", 4: "FRACTAL_Z", 29: "FRACTAL_NZ", 30: "NCDHW"}
_NPU_ND = 2


class TorchBackend:
    """Implements ``backends.base.Backend`` for torch.

    Args:
        kernel: digest tensors on a CPU by the compiled kernel, where there is one.

    Attributes:
        digest_kernel: which kernel that is, or why there is none.
    """

    name = "torch"

    def __init__(self, *, kernel: bool = True) -> None:
        found, self.digest_kernel = digest_kernel() if kernel else (None, "framework operations")
        self._host = None if found is None else HostDigests(found)

    def is_tensor(self, value: object) -> bool:
        """Tell whether ``value`` is a torch tensor."""
        return isinstance(value, torch.Tensor)

    def shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return the logical shape."""
        return tuple(tensor.shape)

    def dtype(self, tensor: torch.Tensor) -> str:
        """Return the framework-neutral name of the element type."""
        return str(tensor.dtype).removeprefix("torch.")

    def layout(self, tensor: torch.Tensor) -> Layout:
        """Return strides, offset, contiguity, and on an NPU the storage format."""
        layout = self.form(tensor).layout
        assert layout is not None
        return layout

    def form(self, tensor: torch.Tensor) -> Form:
        """Return shape, element type and layout."""
        return _form(
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            tensor.is_contiguous(),
            _npu_format(tensor) if not tensor.is_cpu and tensor.device.type == "npu" else "",
        )

    def begin_digest(
        self, tensor: torch.Tensor, *, statistics: bool, sketch: bool = False
    ) -> Sums | HostDigest:
        """Enqueue the digest; touches neither the tensor's version, nor autograd, nor a random generator.

        Raises:
            PrecisionError: the tensor cannot be read as dense elements of a known type.
        """
        if self._host is not None and tensor.is_cpu and tensor.dim() < MAX_DIMS:
            return _host_digest(self._host, tensor, None, statistics=statistics, sketch=sketch)
        # inference mode: nothing of what follows is recorded by autograd or counted as a write
        with torch.inference_mode():
            return sums_of(_readable(tensor), statistics=statistics, sketch=sketch)

    def begin_placed_digest(
        self, tensor: torch.Tensor, part: Part, *, statistics: bool, sketch: bool = False
    ) -> Sums | HostDigest:
        """Enqueue the digest of a part of a canonical tensor, with its elements numbered as they are there.

        Raises:
            PrecisionError: as ``begin_digest``; or the tensor does not have the part's number of elements.
        """
        require_part(tensor, part)
        if self._host is not None and tensor.is_cpu and tensor.dim() < MAX_DIMS:
            return _host_digest(self._host, tensor, part, statistics=statistics, sketch=sketch)
        with torch.inference_mode():
            return sums_of(_readable(tensor), statistics=statistics, sketch=sketch, part=part)

    def finish_digests(self, handles: Sequence[Sums | HostDigest]) -> list[Digest]:
        """Wait once per device and return the digests."""
        taken = [handle for handle in handles if isinstance(handle, HostDigest)]
        on_host = [] if self._host is None else self._host.finish(taken)
        if len(taken) == len(handles):
            return on_host
        by_device: dict[torch.device, dict[int, Sums]] = {}
        for place, handle in enumerate(handles):
            if isinstance(handle, Sums):
                by_device.setdefault(handle.device, {})[place] = handle
        digests: dict[int, Digest] = {}
        for device, sums in by_device.items():
            digests.update(zip(sums, _finish(device, list(sums.values())), strict=True))
        others = iter(on_host)
        return [digests[place] if place in digests else next(others) for place in range(len(handles))]

    def snapshot(self, tensor: torch.Tensor) -> torch.Tensor:
        """Enqueue a copy in C order.

        Raises:
            PrecisionError: the tensor cannot be read as dense elements of a known type.
        """
        with torch.inference_mode():
            return _readable(tensor).clone(memory_format=torch.contiguous_format)

    def to_host(self, snapshot: torch.Tensor) -> HostTensor:
        """Copy a snapshot to the host; call it after ``finish_digests`` has waited for the device."""
        with torch.inference_mode():
            host = snapshot.cpu()
            plain = torch.view_as_real(host) if host.is_complex() else host
            bits = plain.view(ELEMENTS[plain.dtype].view).numpy()
        return HostTensor(bits=bits.view(f"u{bits.dtype.itemsize}"), dtype=self.dtype(snapshot))


@cache
def _reading(dtype: torch.dtype) -> Reading:
    """Return how the kernel reads an element type.

    Raises:
        PrecisionError: the element type is unknown.
    """
    element, numbers = element_of(dtype), None
    if dtype.itemsize == 1 and element.numbers:
        numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    name = str(dtype).removeprefix("torch.")
    return reading_of(name, width=dtype.itemsize, numbers=numbers, floating=element.floating)


@lru_cache(maxsize=8192)
def _form(
    dtype: torch.dtype,
    shape: torch.Size,
    stride: tuple[int, ...],
    storage_offset: int,
    contiguous: bool,
    storage_format: str,
) -> Form:
    layout = Layout(
        stride=tuple(stride), storage_offset=storage_offset, contiguous=contiguous, format=storage_format
    )
    return Form(shape=tuple(shape), dtype=str(dtype).removeprefix("torch."), layout=layout)


@lru_cache(maxsize=2048)
def _geometry(dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...], part: Part | None) -> Geometry:
    return Geometry(shape, stride, _reading(dtype), runs=None if part is None else runs_of(part))


def _host_digest(
    host: HostDigests, tensor: torch.Tensor, part: Part | None, *, statistics: bool, sketch: bool
) -> HostDigest:
    if not _plain(tensor):
        with torch.inference_mode():
            tensor = _readable(tensor)
            tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    geometry = _geometry(tensor.dtype, tensor.shape, tensor.stride(), part)
    return host.take(tensor.data_ptr(), geometry, statistics=statistics, sketch=sketch)


def _plain(tensor: torch.Tensor) -> bool:
    """Tell whether the elements of a tensor on the host lie in its memory as they are: nearly all do."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.dtype in _PLAIN
        and not tensor.is_neg()
        and tensor.untyped_storage().nbytes() > 0
    )


_PLAIN = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32})


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        kind = f"{tensor.layout} {tensor.dtype} on {tensor.device.type}"
        raise PrecisionError("cannot read the elements of this tensor", found=kind, expected="a dense tensor")
    plain = tensor.detach()
    if plain.is_complex():
        plain = plain.resolve_conj()
    if plain.is_neg():
        plain = plain.resolve_neg()
    if plain.numel() and not plain.untyped_storage().nbytes():
        raise PrecisionError("the memory of this tensor was freed before it could be read")
    if plain.device.type == "npu" and _npu_format(plain) not in ("ND", "NCHW", "NCDHW", ""):
        import torch_npu

        plain = torch_npu.npu_format_cast(plain, _NPU_ND)
    return plain


def _npu_format(tensor: torch.Tensor) -> str:
    import torch_npu

    code = int(torch_npu.get_npu_format(tensor))
    return _NPU_FORMATS.get(code, f"format {code}")


def _finish(device: torch.device, handles: Sequence[Sums]) -> Iterator[Digest]:
    if device.type != "cpu":  # digests may have been enqueued on several streams
        getattr(torch, device.type).synchronize(device)
    sketched = [handle.sketch for handle in handles if handle.sketch is not None]
    with torch.inference_mode():
        integers, floats, values = _to_host(
            [tensor for handle in handles for tensor in handle.integers],
            [tensor for handle in handles for tensor in handle.floats],
            sketched,
        )
    sketches = _sketches(sketched, values)
    integer = number = 0
    for handle in handles:
        integers_end = integer + sum(tensor.numel() for tensor in handle.integers)
        numbers_end = number + len(handle.floats)
        digest = _digest(handle, integers[integer:integers_end], floats[number:numbers_end])
        yield digest if handle.sketch is None else replace(digest, sketch=next(sketches))
        integer, number = integers_end, numbers_end


def _sketches(sums: list[torch.Tensor], values: NDArray[Any]) -> Iterator[Sketch | None]:
    roundoffs = [ROUNDOFF if one.dtype == torch.float64 else SINGLE_ROUNDOFF for one in sums]
    rows = values.astype(np.float64).reshape(-1, BUCKETS)
    return iter([pack(row, roundoff=roundoff) for row, roundoff in zip(rows, roundoffs, strict=True)])


def _to_host(*groups: list[torch.Tensor]) -> list[NDArray[Any]]:
    """Concatenate the 1-d tensors of each group, all of one device, on the host: one copy, of their bytes."""
    joined = [torch.cat(group) if group else None for group in groups]
    parts = [one.view(torch.uint8) for one in joined if one is not None]
    data, arrays, end = torch.cat(parts).cpu().numpy() if parts else np.empty(0, np.uint8), [], 0
    for one in joined:
        start, end = end, end + (0 if one is None else one.numel() * one.itemsize)
        name = "float64" if one is None else str(one.dtype).removeprefix("torch.")
        arrays.append(data[start:end].view(name))
    return arrays


def _digest(sums: Sums, integers: NDArray[np.int64], floats: NDArray[np.floating[Any]]) -> Digest:
    if not sums.numel:
        return Digest(fingerprint=0, unordered=0, statistics=EMPTY if sums.statistics else None)
    ordered, unordered = (int(value) & 0xFFFF_FFFF_FFFF_FFFF for value in integers[:2].tolist())
    if not len(floats):
        return Digest(fingerprint=ordered, unordered=unordered)
    histogram = integers[2:258]
    bins = np.flatnonzero(histogram)
    zeros, nans, infs = (*integers[258:].tolist(), 0, 0)[:3]
    if sums.floating and not sums.double:
        infs = int(histogram[255]) - nans
    moments = statistics_from(
        floats.tolist(),
        numel=sums.numel,
        zeros=int(zeros),
        nans=int(nans),
        infs=int(infs),
        exponents=dict(zip(bins.tolist(), histogram[bins].tolist(), strict=True)),
    )
    return Digest(fingerprint=ordered, unordered=unordered, statistics=moments)
