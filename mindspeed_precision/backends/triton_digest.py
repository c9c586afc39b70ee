"""Fingerprints and statistics of CUDA tensors in one pass over memory, by a Triton kernel.

Same definitions as ``record.fingerprint`` and ``record.statistics``: the integers are those of torch's
operations, bit for bit. Sums of floating numbers are taken per program and then over programs, in a fixed
order. Triton is no requirement: torch installs it with CUDA, and without it torch's operations are used. The
kernel ran in Triton's interpreter only, on a CPU; on a GPU it is compared with torch's operations before it
is used (``torch_digest.fused_kernel``).

Every program takes some blocks of 1024 words. Of elements of 64 bits the two words of each are loaded apart.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from mindspeed_precision.record.fingerprint import (
    BLOCK_SEED,
    MULTIPLIERS,
    OFFSET,
    SECOND,
    SHIFT16,
    SPREAD,
    SPREAD16,
    WORDS,
    word_keys,
)

BLOCKS = 16
"""Blocks of each program: the partial results of a tensor are less than a thousandth of it."""

TAIL = 4
"""Elements of which a multiple is whole words in every width."""

FLOATS = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 3, torch.float64: 8}
"""Element types whose statistics the kernel takes, by the number by which it knows them."""

_OFFSET, _SPREAD, _SPREAD16, _SHIFT16 = (tl.constexpr(value) for value in (OFFSET, SPREAD, SPREAD16, SHIFT16))
_FIRST16, _SECOND16 = (tl.constexpr(value) for value in MULTIPLIERS)
_SECOND, _BLOCK_SEED = tl.constexpr(SECOND), tl.constexpr(BLOCK_SEED)
_WORDS = tl.constexpr(WORDS)
_LARGEST = tl.constexpr(math.inf)


@triton.jit
def _turned(word):  # type: ignore[no-untyped-def]
    return (word << 16) | (word >> 16)


@triton.jit
def _mixed(value):  # type: ignore[no-untyped-def]
    value = (value ^ (value >> 30)) * tl.full([], _FIRST16, tl.uint64)
    value = (value ^ (value >> 27)) * tl.full([], _SECOND16, tl.uint64)
    return value ^ (value >> 31)


@triton.jit
def _key(address):  # type: ignore[no-untyped-def]
    return tl.load(address).to(tl.uint32, bitcast=True)


@triton.jit
def _product(one, two):  # type: ignore[no-untyped-def]
    return one.to(tl.uint64) * two.to(tl.uint64)


@triton.jit
def _of_short(element):  # type: ignore[no-untyped-def]
    """Return what elements of 16 bits, in uint32, add to the unordered sum."""
    spread = (element * _SPREAD16) & 0xFFFF
    short = ((spread >> _SHIFT16) | 1).to(tl.int64)
    first = ((element ^ 0x8000).to(tl.int64) - 0x8000) * short
    second = ((spread ^ 0x8000).to(tl.int64) - 0x8000) * short
    factors = tl.full([], _FIRST16, tl.uint64), tl.full([], _SECOND16, tl.uint64)
    return first.to(tl.uint64) * factors[0] + second.to(tl.uint64) * factors[1]


@triton.jit
def _moments(value, single, inside, total):  # type: ignore[no-untyped-def]
    """Add elements to ``(exponents, zeros, nans, infs, low, high, sum, squares)``."""
    exponents, zeros, nans, infs, low, high, sums, squares = total
    pattern = single.to(tl.uint32, bitcast=True)
    bins = ((pattern >> 23) & 0xFF).to(tl.int32)
    exponents += tl.histogram(bins, 256, mask=inside).to(tl.int64)
    wide = value.to(tl.float64)
    finite = inside & (wide - wide == 0)
    zeros += tl.sum((inside & (value == 0)).to(tl.int64))
    nans += tl.sum((inside & (value != value)).to(tl.int64))
    infs += tl.sum((inside & (value == value) & (wide - wide != 0)).to(tl.int64))
    low = tl.minimum(low, tl.min(tl.where(finite, wide, _LARGEST)))
    high = tl.maximum(high, tl.max(tl.where(finite, wide, -_LARGEST)))
    clean = tl.where(finite, wide, 0.0)
    return exponents, zeros, nans, infs, low, high, sums + tl.sum(clean), squares + tl.sum(clean * clean)


@triton.jit
def _digest(  # type: ignore[no-untyped-def]
    words, count, first_keys, second_keys, first_block, integers, floats, exponents_out,
    WIDTH: tl.constexpr, KIND: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Digest words, ``[count]`` uint32, into ``[5]`` integers and ``[4]`` floats of each program.

    ``KIND`` is the element type whose statistics are taken, by ``FLOATS``; 0 for none.
    """
    STEP: tl.constexpr = 2 if WIDTH == 8 else 1
    LANES: tl.constexpr = _WORDS // STEP
    lane = tl.arange(0, LANES) * STEP
    program = tl.program_id(0)
    ordered, unordered = tl.zeros([], tl.uint64), tl.zeros([], tl.uint64)
    none, zero = tl.zeros([], tl.int64), tl.zeros([], tl.float64)
    total = (tl.zeros([256], tl.int64), none, none, none, zero + _LARGEST, zero - _LARGEST, zero, zero)
    for number in range(BLOCKS):
        block = program.to(tl.int64) * BLOCKS + number
        first, second = tl.zeros([], tl.uint64), tl.zeros([], tl.uint64)
        place = block * _WORDS + lane
        inside = place < count
        low = tl.load(words + place, mask=inside, other=0).to(tl.uint32, bitcast=True)
        turned = _turned(low)
        first += tl.sum(_product(low, _key(first_keys + lane)))
        second += tl.sum(_product(turned, _key(second_keys + lane)))
        if WIDTH == 8:
            high = tl.load(words + place + 1, mask=inside, other=0).to(tl.uint32, bitcast=True)
            of_high = _turned(high)
            first += tl.sum(_product(high, _key(first_keys + lane + 1)))
            second += tl.sum(_product(of_high, _key(second_keys + lane + 1)))
            unordered += tl.sum(_product(high + turned * _SPREAD + _OFFSET, low + of_high * _SPREAD))
            if KIND == 8:
                pattern = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
                value = pattern.to(tl.float64, bitcast=True)
                total = _moments(value, value.to(tl.float32), inside, total)
        elif WIDTH == 4:
            unordered += tl.sum(_product(low + _OFFSET, turned * _SPREAD))
            if KIND == 4:
                value = low.to(tl.float32, bitcast=True)
                total = _moments(value, value, inside, total)
        elif WIDTH == 2:
            for half in tl.static_range(2):
                element = (low >> (16 * half)) & 0xFFFF
                unordered += tl.sum(_of_short(element))
                if KIND == 2:
                    value = (element << 16).to(tl.float32, bitcast=True)
                    total = _moments(value, value, inside, total)
                if KIND == 3:
                    value = element.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
                    total = _moments(value, value, inside, total)
        else:
            for byte in tl.static_range(4):
                unordered += tl.sum(_of_short((low >> (8 * byte)) & 0xFF))
        key = _mixed((first_block + block).to(tl.uint64) + tl.full([], _BLOCK_SEED, tl.uint64)) | 1
        ordered += key * (first + second * tl.full([], _SECOND, tl.uint64))
    exponents, zeros, nans, infs, smallest, largest, sums, squares = total
    tl.store(integers + program * 5, ordered.to(tl.int64, bitcast=True))
    tl.store(integers + program * 5 + 1, unordered.to(tl.int64, bitcast=True))
    if KIND:
        tl.store(integers + program * 5 + 2, zeros)
        tl.store(integers + program * 5 + 3, nans)
        tl.store(integers + program * 5 + 4, infs)
        tl.store(floats + program * 4, smallest)
        tl.store(floats + program * 4 + 1, largest)
        tl.store(floats + program * 4 + 2, sums)
        tl.store(floats + program * 4 + 3, squares)
        tl.atomic_add(exponents_out + tl.arange(0, 256), exponents)  # of integers: no order is seen


_KEYS: dict[torch.device, list[torch.Tensor]] = {}


def _keys(device: torch.device) -> list[torch.Tensor]:
    if device not in _KEYS:  # a copy from the host, which is done before the next line runs
        drawn = [torch.tensor(keys.astype("int64").tolist(), dtype=torch.int64) for keys in word_keys()]
        _KEYS[device] = [keys.to(torch.int32).to(device) for keys in drawn]
    return _KEYS[device]


def countable(flat: torch.Tensor, start: int, *, statistics: bool) -> int:
    """Return how many of a tensor's elements, from the first on, ``digest_sums`` can take.

    Args:
        flat: ``[n]``.
        start: canonical index of the first.
        statistics: also the moments.
    """
    width = flat.dtype.itemsize
    begins = start * width % (4 * WORDS) == 0 and flat.storage_offset() * width % 4 == 0
    if not begins or not flat.is_contiguous() or (statistics and flat.dtype not in FLOATS):
        return 0
    return flat.numel() // TAIL * TAIL


def digest_sums(
    flat: torch.Tensor, *, block: int = 0, statistics: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the sums of elements that begin with a block of the canonical tensor.

    Args:
        flat: ``[n]`` contiguous, n a multiple of ``TAIL`` above 0, at an address that 4 divides.
        block: number of that block.
        statistics: also the moments; of the types in ``FLOATS`` alone.

    Returns:
        ``Sums.integers`` and ``Sums.floats`` of ``backends.torch_digest``, the latter empty without moments.
    """
    words, width, device = flat.view(torch.int32), flat.dtype.itemsize, flat.device
    programs = -(-words.numel() // (WORDS * BLOCKS))
    integers = torch.empty(programs, 5, dtype=torch.int64, device=device)
    floats = torch.empty(programs, 4, dtype=torch.float64, device=device)
    exponents = torch.zeros(256, dtype=torch.int64, device=device)
    arguments: list[Any] = [words, words.numel(), *_keys(device), block, integers, floats, exponents]
    kind = FLOATS[flat.dtype] if statistics else 0
    _digest[(programs,)](*arguments, WIDTH=width, KIND=kind, BLOCKS=BLOCKS)
    if not statistics:
        return [integers[:, :2].sum(0)], []
    counts = integers.sum(0)
    found = [counts[:2], exponents, counts[2:3], counts[3:4]]
    if flat.dtype == torch.float64:
        found.append(counts[4:])
    ends = [floats[:, 0].amin(0, keepdim=True), floats[:, 1].amax(0, keepdim=True)]
    return found, [*ends, floats[:, 2].sum(0, keepdim=True), floats[:, 3].sum(0, keepdim=True)]
