"""Fingerprint, statistics and sketch of a torch tensor, in torch operations on the tensor's own device.

Same definitions as ``record.fingerprint``, ``record.statistics`` and ``record.sketch``. Nothing here waits
for a device: no ``.item()``, no ``bool(tensor)``, no copy to the host. Sums of integers wrap around and do
not care about order, so the integer results are the same on every device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mindspeed_precision.backends import torch_tables as tables
from mindspeed_precision.backends.torch_fingerprint import fingerprint_sums, scattered_sums
from mindspeed_precision.errors import PrecisionError
from mindspeed_precision.record.fingerprint import WORDS
from mindspeed_precision.record.placement import runs_of
from mindspeed_precision.record.sketch import BUCKETS
from mindspeed_precision.records import Part

CPU_PIECE = 1 << 16
"""Elements per pass on a CPU: temporaries of 1 MiB stay near its cache; smaller ones cost more in calls."""

DEVICE_PIECE = 1 << 20
"""Elements per pass on an accelerator: temporaries of 16 MiB, kernels long enough to hide their launch."""

FUSED_PIECE = 1 << 30
"""Elements per pass of the Triton kernel, which has hardly any temporaries."""

SAMPLE = 0x9E3779B97F4A7C15 - (1 << 64)
"""Makes bits of all sorts of consecutive numbers."""

LONG_RUN = 1 << 12
"""Elements from which on a run of a shard is worth operations of its own."""

_LANES = 1024
"""Copies of the histogram on an accelerator, so that equal exponents do not queue for one counter."""


@dataclass(frozen=True, kw_only=True)
class Element:
    """How to read one element type.

    Attributes:
        view: integer type of the same width.
        floating: may hold NaN and infinities.
        numbers: can be converted to float32; other types get no statistics.
    """

    view: torch.dtype
    floating: bool
    numbers: bool = True


def _elements() -> dict[torch.dtype, Element]:
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    floating = ["float16", "bfloat16", "float32", "float64"]
    floating += ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
    integers = [f"{sign}int{width}" for sign in ("", "u") for width in (8, 16, 32, 64)]
    table = {}
    for name in [*floating, *integers, "bool", "float4_e2m1fn_x2"]:
        dtype = getattr(torch, name, None)  # older builds lack the newer types
        if dtype is not None:
            numbers = name != "float4_e2m1fn_x2"  # two elements per byte: bits only
            table[dtype] = Element(view=widths[dtype.itemsize], floating=name in floating, numbers=numbers)
    return table


ELEMENTS = _elements()


def element_of(dtype: torch.dtype) -> Element:
    """Return how to read elements of a real type.

    Raises:
        PrecisionError: the element type is unknown.
    """
    element = ELEMENTS.get(dtype)
    if element is None:
        raise PrecisionError("no way to take a fingerprint of this element type", found=str(dtype))
    return element


@dataclass(kw_only=True)
class Sums:
    """Partial sums over a tensor, on its device; the arithmetic that is left is done on the host.

    Attributes:
        device: where the sums are.
        numel: elements (two per complex element).
        statistics: the moments are there too.
        floating: may hold NaN and infinities.
        double: infinities were counted apart, since float64 numbers can exceed float32.
        integers: ``[2]`` fingerprints, and with statistics ``[256]`` exponents, ``[1]`` zeros, and for
            floating types ``[1]`` NaNs, and for float64 ``[1]`` infinities; all int64.
        floats: ``[1]`` each: minimum, maximum, sum and sum of squares of the finite elements.
        sketch: ``[256]`` sums of the finite elements by bucket; None where there is no sketch.
    """

    device: torch.device
    numel: int
    statistics: bool
    floating: bool = False
    double: bool = False
    integers: list[torch.Tensor] = field(default_factory=list)
    floats: list[torch.Tensor] = field(default_factory=list)
    sketch: torch.Tensor | None = None

    def add(self, other: Sums) -> None:
        """Add the sums of another part of the same tensor."""
        self.integers = [mine + theirs for mine, theirs in zip(self.integers, other.integers, strict=True)]
        if self.floats:
            (low, high, *mine), (other_low, other_high, *theirs) = self.floats, other.floats
            totals = [a + b for a, b in zip(mine, theirs, strict=True)]
            self.floats = [torch.minimum(low, other_low), torch.maximum(high, other_high), *totals]
        if self.sketch is not None and other.sketch is not None:
            self.sketch = self.sketch + other.sketch


def require_part(tensor: torch.Tensor, part: Part) -> None:
    """Require that a tensor has the elements of a part.

    Raises:
        PrecisionError: it has another number of them.
    """
    if tensor.is_complex() or tensor.numel() != part.stop - part.start:
        found, expected = f"{tensor.numel()} of {tensor.dtype}", f"{part.stop - part.start} real numbers"
        raise PrecisionError(
            "not the part of the parameter that it should be", found=found, expected=expected
        )


def sums_of(
    tensor: torch.Tensor, *, statistics: bool, sketch: bool = False, part: Part | None = None
) -> Sums:
    """Enqueue everything that a digest of ``tensor`` needs.

    Args:
        tensor: ``[...]`` dense, any strides, already detached.
        statistics: also the moments.
        sketch: also the sketch, if the moments are taken and it is a floating type of several elements.
        part: which elements of a canonical tensor these are, as many; None: it is whole.

    Raises:
        PrecisionError: the element type is unknown.
    """
    per_element = 2 if tensor.is_complex() else 1
    real = tensor.dtype.to_real() if per_element == 2 else tensor.dtype
    element = element_of(real)
    statistics = statistics and element.numbers
    total = Sums(
        device=tensor.device,
        numel=tensor.numel() * per_element,
        statistics=statistics,
        floating=element.floating,
        double=real == torch.float64,
    )
    sketch = sketch and statistics and element.floating and total.numel > 1
    first = True
    limit = CPU_PIECE if tensor.device.type == "cpu" else DEVICE_PIECE
    if not sketch and fused_kernel(tensor.device) is not None:
        limit = FUSED_PIECE
    for flat, places in _placed_pieces(tensor, limit, per_element, part):
        for sums in _piece_sums(flat, places, element, statistics=statistics, sketch=sketch):
            if first:
                total.integers, total.floats, total.sketch = sums.integers, sums.floats, sums.sketch
            else:
                total.add(sums)
            first = False
    return total


def _piece_sums(
    flat: torch.Tensor, places: _Run | _Scattered, element: Element, *, statistics: bool, sketch: bool
) -> Iterator[Sums]:
    """Yield the sums of a piece: where there is a kernel for it those of its most, and those of its end."""
    fused = None if sketch or not isinstance(places, _Run) else fused_kernel(flat.device)
    if fused is not None and isinstance(places, _Run):
        count = fused.countable(flat, places.start, statistics=statistics)
        if count:
            block = places.start * flat.dtype.itemsize // (4 * WORDS)
            integers, floats = fused.digest_sums(flat[:count], block=block, statistics=statistics)
            yield Sums(
                device=flat.device, numel=count, statistics=statistics, integers=integers, floats=floats
            )
            flat, places = flat[count:], _Run(start=places.start + count)
    if flat.numel():
        integers = [places.fingerprints(flat.view(element.view))]
        sums = Sums(device=flat.device, numel=flat.numel(), statistics=statistics, integers=integers)
        if statistics:
            clean = _add_statistics(sums, flat, element)
            sums.sketch = places.sketch(clean) if sketch else None
        yield sums


@lru_cache(maxsize=16)
def fused_kernel(device: torch.device) -> Any:
    """Return ``backends.triton_digest`` where a device runs it and gets the numbers of torch's operations.

    Asked once per device; it waits for the device then.
    """
    if device.type != "cuda":
        return None
    try:
        from mindspeed_precision.backends import triton_digest
    except ImportError:  # no triton
        return None
    try:
        return triton_digest if all(_agrees(triton_digest, dtype, device) for dtype in ELEMENTS) else None
    except Exception:  # noqa: BLE001  triton compiles for the device, which can fail in many ways
        return None


def _agrees(fused: Any, dtype: torch.dtype, device: torch.device) -> bool:
    patterns = torch.arange(20 * 1024, dtype=torch.int64, device=device).mul_(SAMPLE)
    flat = patterns.view(torch.uint8)[: 9 * 1024 * dtype.itemsize].view(dtype)
    element, statistics = element_of(dtype), dtype in fused.FLOATS
    integers, floats = fused.digest_sums(flat, statistics=statistics)
    wanted = Sums(device=device, numel=flat.numel(), statistics=statistics)
    wanted.integers = [fingerprint_sums(flat.view(element.view), 0)]
    if statistics:
        _add_statistics(wanted, flat, element)
    same = all(torch.equal(one, two) for one, two in zip(integers, wanted.integers, strict=True))
    return same and all(torch.equal(*pair) for pair in zip(floats[:2], wanted.floats[:2], strict=True))


def _pieces(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Yield flat pieces of at most ``limit`` elements in C order; contiguous memory is not copied."""
    numel = tensor.numel()
    if numel <= limit:
        if numel:
            flat = tensor.reshape(-1).contiguous()
            yield flat if flat.stride(0) == 1 else flat.as_strided((1,), (1,))  # one element has any stride
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(limit)
    else:
        row = numel // tensor.shape[0]
        for part in tensor.split(max(1, limit // row)):
            yield from _pieces(part if row <= limit else part[0], limit)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Elements that follow each other in the canonical tensor, from ``start``."""

    start: int

    def fingerprints(self, flat: torch.Tensor) -> torch.Tensor:
        return fingerprint_sums(flat, self.start)

    def sketch(self, clean: torch.Tensor) -> torch.Tensor:
        return _sketch_sums(clean, self.start)


@dataclass(frozen=True, kw_only=True)
class _Scattered:
    """Elements anywhere in a canonical tensor of ``numel``, ``index`` ``[n]`` their positions."""

    index: torch.Tensor
    numel: int

    def fingerprints(self, flat: torch.Tensor) -> torch.Tensor:
        blocks = -(-self.numel * flat.dtype.itemsize // (4 * WORDS))
        return scattered_sums(flat, self.index, blocks)

    def sketch(self, clean: torch.Tensor) -> torch.Tensor:
        return _scattered_sketch_sums(clean, self.index)


def _placed_pieces(
    tensor: torch.Tensor, limit: int, per_element: int, part: Part | None
) -> Iterator[tuple[torch.Tensor, _Run | _Scattered]]:
    """Yield flat pieces with where they are in the canonical tensor."""
    start = 0
    for piece in _pieces(tensor, limit):
        flat = torch.view_as_real(piece).reshape(-1) if per_element == 2 else piece
        count = flat.numel()
        if part is None:
            yield flat, _Run(start=start)
        else:
            starts, lengths = _runs(part, start, start + count)
            if len(starts) * LONG_RUN > count and len(starts) > 1:
                index = _index(starts, lengths, count, tensor.device)
                yield flat, _Scattered(index=index, numel=math.prod(part.placement.shape))
            else:
                for one, place in zip(flat.split(lengths.tolist()), starts.tolist(), strict=True):
                    yield one, _Run(start=place)
        start += count


_all_runs = lru_cache(maxsize=256)(runs_of)


def _runs(part: Part, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the runs of elements ``[start, stop)`` of what a part holds."""
    starts, lengths = _all_runs(part)
    ends = np.cumsum(lengths)
    first, last = np.searchsorted(ends, start, "right"), np.searchsorted(ends, stop, "left") + 1
    starts, lengths, ends = starts[first:last], lengths[first:last], ends[first:last]
    before = np.maximum(start - (ends - lengths), 0)
    return starts + before, np.minimum(ends, stop) - np.maximum(ends - lengths, start)


def _index(
    starts: NDArray[np.int64], lengths: NDArray[np.int64], count: int, device: torch.device
) -> torch.Tensor:
    """Return the canonical index of the elements of runs, ``[count]`` int64."""
    jumps = torch.from_numpy(starts - (np.cumsum(lengths) - lengths)).to(device, non_blocking=True)
    repeats = torch.from_numpy(lengths).to(device, non_blocking=True)
    local = torch.arange(count, dtype=torch.int64, device=device)
    return local.add_(torch.repeat_interleave(jumps, repeats, output_size=count))


def widest_float(device: torch.device) -> torch.dtype:
    """Return the type in which sums are taken: float64 does not exist on every accelerator."""
    return torch.float32 if device.type == "npu" else torch.float64


def _add_statistics(sums: Sums, part: torch.Tensor, element: Element) -> torch.Tensor:
    """Add the moments of ``part``; return its elements in the widest type, 0 where they are not finite."""
    wide = part.to(widest_float(part.device))
    sums.integers.append(exponents(part))
    sums.integers.append((wide == 0).sum(0, keepdim=True))
    low = high = clean = wide
    if element.floating:
        sums.integers.append((wide != wide).sum(0, keepdim=True))
        if part.dtype == torch.float64:
            sums.integers.append((wide.abs() == torch.inf).sum(0, keepdim=True))
        low = torch.nan_to_num(wide, nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
        high = torch.nan_to_num(wide, nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
        clean = torch.nan_to_num(wide, nan=0.0, posinf=0.0, neginf=0.0)
    sums.floats = [low.amin(0, keepdim=True), high.amax(0, keepdim=True), clean.sum(0, keepdim=True)]
    sums.floats.append((clean * clean).sum(0, keepdim=True))
    return clean


def _sketch_sums(clean: torch.Tensor, start: int) -> torch.Tensor:
    """Return the sketch of a part, ``[256]``: the sum of its blocks of 256 elements, each turned.

    Gathered rather than scattered: no order of atomic additions, so the same numbers every time.

    Args:
        clean: ``[n]`` finite elements.
        start: position of the first one.
    """
    signed = _with_signs(clean, tables.SIGNS.rows(start, len(clean), clean.device))
    before, after = start % BUCKETS, -(start + len(clean)) % BUCKETS
    if before or after:
        signed = torch.nn.functional.pad(signed, (before, after))
    blocks = signed.view(-1, BUCKETS)
    turned = blocks.gather(1, tables.SOURCES.rows(start // BUCKETS, len(blocks), clean.device))
    return turned[0] if len(blocks) == 1 else turned.sum(0)


def _scattered_sketch_sums(clean: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the sketch of elements anywhere in a tensor, ``[256]``.

    Args:
        clean: ``[n]`` finite elements.
        index: ``[n]`` their positions.
    """
    bucket = tables.turns(index >> 8).add_(index).bitwise_and_(BUCKETS - 1)
    signed = _with_signs(clean, tables.sign_bits(index))
    return torch.zeros(BUCKETS, dtype=clean.dtype, device=clean.device).index_add_(0, bucket, signed)


def _with_signs(clean: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    if clean.dtype == torch.float64:  # a flip of the sign bit takes a tenth of the time of a choice
        return (signs ^ clean.view(torch.int64)).view(torch.float64)
    return torch.where(signs < 0, -clean, clean)


def exponents(part: torch.Tensor) -> torch.Tensor:
    """Count the exponents of ``part``'s elements as float32, ``[256]`` int64."""
    single = part if part.dtype == torch.float32 else part.to(torch.float32)
    bins = (single.view(torch.int32) >> 23).bitwise_and_(0xFF)
    if part.device.type == "cpu":
        return torch.bincount(bins, minlength=256)
    return histogram_by_scatter(bins)


def histogram_by_scatter(bins: torch.Tensor) -> torch.Tensor:
    """Count ``bins`` (``[n]``, 0 to 255) without waiting, as ``bincount`` would on an accelerator."""
    lane = torch.arange(bins.numel(), dtype=torch.int64, device=bins.device).bitwise_and_(_LANES - 1)
    place = lane.mul_(256).add_(bins)
    counters = torch.zeros(256 * _LANES, dtype=torch.int64, device=bins.device)
    return counters.scatter_add_(0, place, torch.ones_like(place)).view(_LANES, 256).sum(0)
