"""Fingerprint, statistics and sketch of a torch tensor, in torch operations on the tensor's own device.

Same definitions as ``record.fingerprint``, ``record.statistics`` and ``record.sketch``. Nothing here waits
for a device: no ``.item()``, no ``bool(tensor)``, no copy to the host. Sums of integers wrap around and do
not care about order, so the integer results are the same on every device.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed_precision.errors import PrecisionError
from mindspeed_precision.record.fingerprint import MASK64, MULTIPLIERS, SEED, SHIFTS, UNORDERED_KEY
from mindspeed_precision.record.sketch import BUCKETS
from mindspeed_precision.records import Part, Placement, Split

CPU_PIECE = 1 << 16
"""Elements per pass on a CPU: temporaries of 1 MiB stay near its cache; smaller ones cost more in calls."""

DEVICE_PIECE = 1 << 20
"""Elements per pass on an accelerator: temporaries of 16 MiB, kernels long enough to hide their launch."""

TABLE_LIMIT = 1 << 22
"""Positions whose keys are kept per device (64 MiB); keys beyond are computed when needed."""

KEPT_BLOCKS = CPU_PIECE >> 8
"""Blocks of 256 elements of which the sketch's turns are kept per device (0.5 MiB): all of a small tensor."""

_LANES = 1024
"""Copies of the histogram on an accelerator, so that equal exponents do not queue for one counter."""


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_SIGN_BIT = -(1 << 63)
_MULTIPLIERS = tuple(_signed(value) for value in MULTIPLIERS)
_SHIFTS = tuple((shift, MASK64 >> shift) for shift in SHIFTS)


@dataclass(frozen=True, kw_only=True)
class Element:
    """How to read one element type.

    Attributes:
        view: integer type of the same width.
        mask: zero-extends ``view`` to 64 bits; 0 where nothing is to be done.
        floating: may hold NaN and infinities.
        numbers: can be converted to float32; other types get no statistics.
    """

    view: torch.dtype
    mask: int
    floating: bool
    numbers: bool = True


def _elements() -> dict[torch.dtype, Element]:
    widths = {
        1: (torch.uint8, 0),
        2: (torch.int16, 0xFFFF),
        4: (torch.int32, 0xFFFFFFFF),
        8: (torch.int64, 0),
    }
    floating = ["float16", "bfloat16", "float32", "float64"]
    floating += ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
    integers = [f"{sign}int{width}" for sign in ("", "u") for width in (8, 16, 32, 64)]
    table = {}
    for name in [*floating, *integers, "bool", "float4_e2m1fn_x2"]:
        dtype = getattr(torch, name, None)  # older builds lack the newer types
        if dtype is not None:
            view, mask = widths[dtype.itemsize]
            numbers = name != "float4_e2m1fn_x2"  # two elements per byte: bits only
            table[dtype] = Element(view=view, mask=mask, floating=name in floating, numbers=numbers)
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


def sums_of(
    tensor: torch.Tensor, *, statistics: bool, sketch: bool = False, part: Part | None = None
) -> Sums:
    """Enqueue everything that a digest of ``tensor`` needs.

    Args:
        tensor: ``[...]`` dense, any strides, already detached.
        statistics: also the moments.
        sketch: also the sketch, if the moments are taken and it is a floating type of several elements.
        part: which elements of a canonical tensor these are; None: it is whole.

    Raises:
        PrecisionError: the element type is unknown, or ``part`` does not fit.
    """
    if part is not None and (tensor.is_complex() or tensor.numel() != part.stop - part.start):
        found, expected = f"{tensor.numel()} of {tensor.dtype}", f"{part.stop - part.start} real numbers"
        raise PrecisionError(
            "not the part of the parameter that it should be", found=found, expected=expected
        )
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
    for flat, places in _placed_pieces(tensor, limit, per_element, part):
        keys = places.keys()
        sums = Sums(
            device=total.device,
            numel=flat.numel(),
            statistics=statistics,
            integers=[_fingerprint_sums(flat, element, keys)],
        )
        if statistics:
            clean = _add_statistics(sums, flat, element)
            sums.sketch = places.sketch(clean, keys[0]) if sketch else None
        if first:
            total.integers, total.floats, total.sketch = sums.integers, sums.floats, sums.sketch
        else:
            total.add(sums)
        first = False
    return total


def _pieces(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Yield flat pieces of at most ``limit`` elements in C order; contiguous memory is not copied."""
    numel = tensor.numel()
    if numel <= limit:
        if numel:
            yield tensor.reshape(-1)
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(limit)
    else:
        row = numel // tensor.shape[0]
        for part in tensor.split(max(1, limit // row)):
            yield from _pieces(part if row <= limit else part[0], limit)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Elements that follow each other in the canonical tensor.

    Attributes:
        start: position of the first one.
        count: how many they are.
        device: where they are.
    """

    start: int
    count: int
    device: torch.device

    def keys(self) -> torch.Tensor:
        return KEYS.rows(self.start, self.count, self.device)

    def sketch(self, clean: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return _sketch_sums(clean, keys, self.start)


@dataclass(frozen=True, kw_only=True)
class _Scattered:
    """Elements anywhere in the canonical tensor, ``index`` ``[n]`` their positions."""

    index: torch.Tensor

    def keys(self) -> torch.Tensor:
        return _keys_of(self.index)

    def sketch(self, clean: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return _scattered_sketch_sums(clean, keys, self.index)


def _placed_pieces(
    tensor: torch.Tensor, limit: int, per_element: int, part: Part | None
) -> Iterator[tuple[torch.Tensor, _Run | _Scattered]]:
    """Yield flat pieces with where they are in the canonical tensor."""
    start, device = 0, tensor.device
    rows = part is None or _by_rows(part.placement)
    if part is not None and not rows:
        width = _width(part.placement, part.placement.splits[-1])
        limit = max(limit // width, 1) * width  # whole rows, so that nothing is divided
    for piece in _pieces(tensor, limit):
        flat = torch.view_as_real(piece).reshape(-1) if per_element == 2 else piece
        count = flat.numel()
        if part is None:
            yield flat, _Run(start=start, count=count, device=device)
        elif rows:
            for offset, place, length in _runs(part, start, count):
                yield flat[offset : offset + length], _Run(start=place, count=length, device=device)
        else:
            yield flat, _Scattered(index=_index(part, start, count, device))
        start += count


def _by_rows(placement: Placement) -> bool:
    """Tell whether a rank holds a few ranges of the canonical tensor: the split is of its first dimension."""
    if placement.whole:
        return True
    return len(placement.splits) == 1 and math.prod(placement.shape[: placement.splits[0].dim]) == 1


def _runs(part: Part, start: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield ``(offset in the piece, canonical position, length)`` of a piece of a tensor split by rows."""
    placement, first = part.placement, part.start + start
    blocks: tuple[tuple[int, int], ...] = ((0, placement.local_numel),)
    inner = 1
    if not placement.whole:
        (split,) = placement.splits
        blocks, inner = split.blocks, math.prod(placement.shape[split.dim + 1 :])
    before = 0
    for place, length in blocks:
        low, high = max(first, before * inner), min(first + count, (before + length) * inner)
        if low < high:
            yield low - first, place * inner + low - before * inner, high - low
        before += length


def _width(placement: Placement, split: Split) -> int:
    """Return how many elements of a rank lie in one row of the last split dimension."""
    return split.held * math.prod(placement.shape[split.dim + 1 :])


def _fingerprint_sums(part: torch.Tensor, element: Element, keys: torch.Tensor) -> torch.Tensor:
    bits = part.view(element.view).to(torch.int64)
    if element.mask:
        bits = bits & element.mask
    return _mix(bits ^ keys).sum(1)


def _mix(values: torch.Tensor) -> torch.Tensor:
    """Apply ``mix64`` in place to int64 ``values``; ``>>`` copies the sign, the masks take it away."""
    for (shift, mask), multiplier in zip(_SHIFTS, (*_MULTIPLIERS, None), strict=True):
        values.bitwise_xor_((values >> shift).bitwise_and_(mask))
        if multiplier is not None:
            values.mul_(multiplier)
    return values


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


def _sketch_sums(clean: torch.Tensor, keys: torch.Tensor, start: int) -> torch.Tensor:
    """Return the sketch of a part, ``[256]``: the sum of its blocks of 256 elements, each turned.

    Gathered rather than scattered: no order of atomic additions, so the same numbers every time.

    Args:
        clean: ``[n]`` finite elements.
        keys: ``[n]`` of their positions; the sign is the top bit.
        start: position of the first one.
    """
    if clean.dtype == torch.float64:  # a flip of the sign bit takes a tenth of the time of a choice
        signed = (keys & _SIGN_BIT).bitwise_xor_(clean.view(torch.int64)).view(torch.float64)
    else:
        signed = torch.where(keys < 0, -clean, clean)
    before, after = start % BUCKETS, -(start + len(clean)) % BUCKETS
    if before or after:
        signed = torch.nn.functional.pad(signed, (before, after))
    blocks = signed.view(-1, BUCKETS)
    turned = blocks.gather(1, KEYS.sources(start // BUCKETS, len(blocks), clean.device))
    return turned[0] if len(blocks) == 1 else turned.sum(0)


def _scattered_sketch_sums(clean: torch.Tensor, keys: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the sketch of elements anywhere in a tensor, ``[256]``.

    Args:
        clean: ``[n]`` finite elements.
        keys: ``[n]`` of their positions; the sign is the top bit.
        index: ``[n]`` their positions.
    """
    turns = _mix((index >> 8).add_(_signed(SEED)))
    bucket = turns.add_(index).bitwise_and_(BUCKETS - 1)
    signed = torch.where(keys < 0, -clean, clean)
    return torch.zeros(BUCKETS, dtype=clean.dtype, device=clean.device).index_add_(0, bucket, signed)


def _index(part: Part, start: int, count: int, device: torch.device) -> torch.Tensor:
    """Return the canonical index of ``count`` elements of a part from ``start``, ``[count]`` int64.

    As ``record.placement.canonical_index``, in operations of the device: nothing is copied to it. Of whole
    rows no element is divided.
    """
    placement, first = part.placement, part.start + start
    *outer, last = placement.splits
    width, inner = _width(placement, last), math.prod(placement.shape[last.dim + 1 :])
    scale = placement.shape[last.dim] * inner
    if first % width == 0 and count % width == 0:
        along = _along(last, torch.arange(width, dtype=torch.int64, device=device), inner)
        rows = torch.arange(first // width, (first + count) // width, dtype=torch.int64, device=device)
        return _outside(placement, outer, rows, last.dim).mul_(scale).unsqueeze(1).add(along).reshape(-1)
    local = torch.arange(first, first + count, dtype=torch.int64, device=device)
    row = torch.div(local, width, rounding_mode="floor")
    along = _along(last, local.sub_(row * width), inner)
    return _outside(placement, outer, row, last.dim).mul_(scale).add_(along)


def _outside(placement: Placement, splits: Sequence[Split], rows: torch.Tensor, end: int) -> torch.Tensor:
    """Return the canonical numbers of a rank's rows, ``[n]``, over the dimensions before ``end``."""
    if not splits:
        return rows
    *outer, last = splits
    inner = math.prod(placement.shape[last.dim + 1 : end])
    width = last.held * inner
    above = torch.div(rows, width, rounding_mode="floor")
    along = _along(last, rows - above * width, inner)
    return _outside(placement, outer, above, last.dim).mul_(placement.shape[last.dim] * inner).add_(along)


def _along(split: Split, column: torch.Tensor, inner: int) -> torch.Tensor:
    """Move columns of a rank's row, ``[n]``, to where the blocks have them in the canonical row."""
    moved, before, shift = column.clone(), 0, 0
    for offset, length in split.blocks:
        jump = (offset - before) * inner - shift  # what this block is further off than the one before it
        moved += (column >= before * inner) * jump
        before, shift = before + length, shift + jump
    return moved


def _keys_of(index: torch.Tensor) -> torch.Tensor:
    """Return ``[2, n]`` keys of any positions, as ``KeyTable.rows`` does of consecutive ones."""
    keys = torch.full((2, index.numel()), _signed(UNORDERED_KEY), dtype=torch.int64, device=index.device)
    keys[0] = _mix(index + _signed(SEED))
    return keys


def exponents(part: torch.Tensor) -> torch.Tensor:
    """Count the exponents of ``part``'s elements as float32, ``[256]`` int64."""
    bins = (part.to(torch.float32).view(torch.int32) >> 23).bitwise_and_(0xFF)
    if part.device.type == "cpu":
        return torch.bincount(bins, minlength=256)
    return histogram_by_scatter(bins)


def histogram_by_scatter(bins: torch.Tensor) -> torch.Tensor:
    """Count ``bins`` (``[n]``, 0 to 255) without waiting, as ``bincount`` would on an accelerator."""
    lane = torch.arange(bins.numel(), dtype=torch.int64, device=bins.device).bitwise_and_(_LANES - 1)
    place = lane.mul_(256).add_(bins)
    counters = torch.zeros(256 * _LANES, dtype=torch.int64, device=bins.device)
    return counters.scatter_add_(0, place, torch.ones_like(place)).view(_LANES, 256).sum(0)


class KeyTable:
    """What depends on positions alone, kept per device.

    A table is filled on the stream that first needs it; other streams wait for that on the device, not on
    the host.
    """

    def __init__(self) -> None:
        self._keys: dict[torch.device, _Kept] = {}
        self._sources: dict[torch.device, _Kept] = {}
        self._lock = threading.Lock()

    def rows(self, start: int, count: int, device: torch.device) -> torch.Tensor:
        """Return ``[2, count]`` int64 keys of the positions from ``start``.

        Row 0 is ``mix64(position + SEED)``, row 1 the constant of the unordered sum.
        """
        if start + count > TABLE_LIMIT:
            return self._compute(start, count, device)
        kept = self._keys.get(device)
        if kept is None or kept.table.shape[1] < start + count:
            size = min(TABLE_LIMIT, max(CPU_PIECE, 1 << (start + count - 1).bit_length()))
            with self._lock:
                kept = self._keys[device] = _Kept(self._compute(0, size, device))
        return kept.here()[:, start : start + count]

    def sources(self, start: int, count: int, device: torch.device) -> torch.Tensor:
        """Return ``[count, 256]`` int64, for blocks from ``start``: the element that each bucket takes."""
        if start + count > KEPT_BLOCKS:
            return self._compute_sources(start, count, device)
        kept = self._sources.get(device)
        if kept is None:
            kept = self._sources[device] = _Kept(self._compute_sources(0, KEPT_BLOCKS, device))
        return kept.here()[start : start + count]

    @staticmethod
    def _compute(start: int, count: int, device: torch.device) -> torch.Tensor:
        first = _signed((SEED + start) & MASK64)
        keys = torch.full((2, count), _signed(UNORDERED_KEY), dtype=torch.int64, device=device)
        keys[0] = _mix(torch.arange(count, dtype=torch.int64, device=device).add_(first))
        return keys

    def _compute_sources(self, start: int, count: int, device: torch.device) -> torch.Tensor:
        turns = self.rows(start, count, device)[0].unsqueeze(1)
        return torch.arange(BUCKETS, device=device).sub(turns).bitwise_and_(BUCKETS - 1)


class _Kept:
    """A table, and the moment on its stream from which it can be read."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self._stream = _stream(table.device)
        self._ready = None if self._stream is None else self._stream.record_event()

    def here(self) -> torch.Tensor:
        """Return the table for work on the current stream."""
        if self._ready is not None:
            current = _stream(self.table.device)
            if current != self._stream:
                current.wait_event(self._ready)
        return self.table


def _stream(device: torch.device) -> Any:
    return None if device.type in ("cpu", "meta") else getattr(torch, device.type).current_stream(device)


KEYS = KeyTable()
