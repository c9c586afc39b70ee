"""The fingerprint: 64 bits that are equal exactly when the elements of a tensor are, bit by bit and in place.

This module is the definition, in numpy alone (``docs/dump-format.md`` says the same in prose); backends
compute the same number on the device. The canonical tensor's elements, in C order and little-endian, are one
stream of bytes: element g of w bytes is at ``[g * w, (g + 1) * w)``. Word q of the stream is its bytes
``[4 q, 4 q + 4)`` as an integer, zeros where it ends. With all arithmetic modulo 2^64::

    fingerprint = Σ_q F(q div 1024) * (W_q * P(q mod 1024) + H * rot16(W_q) * Q(q mod 1024))

``rot16`` swaps the halves of a word; P and Q are odd keys of 32 bits, F and H of 64. It is a multilinear hash
(D. Lemire, O. Kaser, *Strongly universal string hashing is fast*, 2014), linear in the bits that are set: the
bytes of a word may lie in different shards. So it does not depend on strides, chunks or threads, and
fingerprints of disjoint shards of one tensor add up. What it misses, and what it cannot miss, is in
``docs/adr/0010-a-linear-fingerprint.md``.

Two elements of the same value but different bits differ: ``-0.0`` is not ``+0.0``, and NaNs with different
payloads are different. The shape is not part of the value: a reshape keeps it, and zeros add nothing.

The unordered companion is a sum over elements that knows no positions (``_unordered``).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALGORITHM = "multilinear-words-1"
"""Name of this definition, written into every dump; a changed definition gets another name."""

WORDS = 1024
"""Words of a block: their keys are the same in every block, and a block has a factor of its own."""

WORD_SEED = 0x9E3779B97F4A7C15
BLOCK_SEED = 0x8CB92BA72F3D8DD7
SECOND = 0xD1B54A32D192ED03
"""H: what the second sum of a block is multiplied by."""

MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
MASK64 = (1 << 64) - 1
MASK32 = (1 << 32) - 1

OFFSET, SPREAD = 0x8021524B, 0x9E3779B1
"""C and K of the unordered sum of elements of 32 and 64 bits; 2^32 - C is the pattern of a NaN."""

SPREAD16, SHIFT16 = 0x6A4D, 5
"""Of elements of 16 and 8 bits."""

CHUNK = 1 << 20
"""Elements per pass, whole blocks of any width: temporary memory is a few times 16 MiB."""


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply splitmix64's finaliser to each element.

    A bijection of 64-bit integers (S. Vigna, ``splitmix64.c``, after D. Stafford's variant 13 of
    MurmurHash3's finaliser).

    Args:
        values: ``[...]`` uint64.

    Returns:
        ``[...]`` uint64, a new array.
    """
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(SHIFTS[0]))
    mixed *= np.uint64(MULTIPLIERS[0])
    mixed ^= mixed >> np.uint64(SHIFTS[1])
    mixed *= np.uint64(MULTIPLIERS[1])
    mixed ^= mixed >> np.uint64(SHIFTS[2])
    return mixed


def mix64_int(value: int) -> int:
    """Apply ``mix64`` to one Python integer in [0, 2^64)."""
    value = ((value ^ (value >> SHIFTS[0])) * MULTIPLIERS[0]) & MASK64
    value = ((value ^ (value >> SHIFTS[1])) * MULTIPLIERS[1]) & MASK64
    return value ^ (value >> SHIFTS[2])


@lru_cache(maxsize=1)
def word_keys() -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return P and Q, ``[1024]`` odd numbers below 2^32 each."""
    drawn = mix64(np.arange(WORDS, dtype=np.uint64) + np.uint64(WORD_SEED))
    first, second = drawn & np.uint64(MASK32), drawn >> np.uint64(32)
    return first | np.uint64(1), second | np.uint64(1)


@lru_cache(maxsize=1)
def half_keys() -> NDArray[np.uint64]:
    """Return what each half of a word, 16 bits, is multiplied by: ``[2048]``, the lower half first.

    Since ``rot16(W) = upper + 2^16 * lower``, these are ``P + 2^16 * H * Q`` and ``2^16 * P + H * Q``.
    """
    first, second = word_keys()
    second = second * np.uint64(SECOND)
    up = np.uint64(16)
    return np.stack([first + (second << up), (first << up) + second], 1).reshape(-1)


def block_keys(blocks: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return F of blocks, ``[...]`` odd numbers below 2^64."""
    drawn: NDArray[np.uint64] = mix64(blocks + np.uint64(BLOCK_SEED)) | np.uint64(1)
    return drawn


def fingerprints(bits: NDArray[Any], *, index: NDArray[np.int64] | None = None) -> tuple[int, int]:
    """Return the fingerprint and the unordered fingerprint of a tensor.

    Args:
        bits: ``[...]`` unsigned integers of the elements' width, or bool (0 and 1); any strides. Complex
            elements come as two, real then imaginary, in a last dimension of size 2.
        index: canonical index of each element of ``bits``, for a shard of a larger tensor; same number of
            elements. None: the tensor is whole, and an element's index is its position in C order.

    Returns:
        ``(fingerprint, unordered)``, each in [0, 2^64); both 0 for an empty tensor.
    """
    assert bits.dtype.kind in "ub", bits.dtype
    assert index is None or index.size == bits.size
    ordered = unordered = 0
    flat = bits.reshape(-1) if bits.flags.c_contiguous else None
    for start in range(0, bits.size, CHUNK):
        stop = min(start + CHUNK, bits.size)
        piece = bits.flat[start:stop] if flat is None else flat[start:stop]
        elements = np.ascontiguousarray(piece, f"<u{bits.itemsize}")
        if index is None:
            ordered += _of_blocks(elements, start * bits.itemsize // (4 * WORDS))
        else:
            ordered += _of_places(elements, np.asarray(index.flat[start:stop]).astype(np.uint64))
        unordered += _unordered(elements)
    return ordered & MASK64, unordered & MASK64


def _of_blocks(elements: NDArray[Any], block: int) -> int:
    """Return the sum of elements that begin with a block, ``[n]``."""
    stream = elements.view(np.uint8)
    padded = np.zeros(-(-stream.size // (4 * WORDS)) * 4 * WORDS, np.uint8)
    padded[: stream.size] = stream
    words = padded.view("<u4").reshape(-1, WORDS).astype(np.uint64)
    first, second = word_keys()
    sums = (words * first).sum(1, dtype=np.uint64)
    sums += (_rot16(words) * second).sum(1, dtype=np.uint64) * np.uint64(SECOND)
    sums *= block_keys(np.arange(block, block + len(words), dtype=np.uint64))
    return int(sums.sum(dtype=np.uint64))


def _of_places(elements: NDArray[Any], places: NDArray[np.uint64]) -> int:
    """Return the sum of elements, ``[n]``, anywhere in the canonical tensor, by the halves of their words."""
    if elements.itemsize == 1:
        halves = elements.astype(np.uint64) << ((places & np.uint64(1)) << np.uint64(3))
        places = places >> np.uint64(1)
    else:
        each = elements.itemsize // 2
        halves = elements.view("<u2").astype(np.uint64)
        places = (places[:, None] * np.uint64(each) + np.arange(each, dtype=np.uint64)).reshape(-1)
    keys = half_keys()[(places % np.uint64(2 * WORDS)).astype(np.int64)]
    return int((halves * keys * block_keys(places // np.uint64(2 * WORDS))).sum(dtype=np.uint64))


def _rot16(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Swap the halves of 32-bit words."""
    turned: NDArray[np.uint64] = ((words << np.uint64(16)) | (words >> np.uint64(16))) & np.uint64(MASK32)
    return turned


def _unordered(elements: NDArray[Any]) -> int:
    """Return the sum over elements, ``[n]``, of a product that depends on nothing but the element.

    Of a word x of 32 bits it is ``(x + C mod 2^32) * (rot16(x) * K mod 2^32)``; of 64 bits, with the words
    lo and hi, ``(hi + rot16(lo) * K + C mod 2^32) * (lo + rot16(hi) * K mod 2^32)``. Of 16 bits, and of 8
    that zeros extend to 16, ``x * a * M1 + y * a * M2`` with ``y = x * K16 mod 2^16``, both x and y read as
    signed, and ``a = y div 32`` as unsigned, made odd. All are 0 for the element 0.
    """
    if elements.itemsize <= 2:
        return _unordered16(elements.astype(np.uint16))
    words, mask = elements.view("<u4").astype(np.uint64), np.uint64(MASK32)
    spread = _rot16(words) * np.uint64(SPREAD) & mask
    if elements.itemsize == 4:
        return int((((words + np.uint64(OFFSET)) & mask) * spread).sum(dtype=np.uint64))
    (low, high), (of_low, of_high) = words.reshape(-1, 2).T, spread.reshape(-1, 2).T
    factors = (high + of_low + np.uint64(OFFSET)) & mask, (low + of_high) & mask
    return int((factors[0] * factors[1]).sum(dtype=np.uint64))


def _unordered16(elements: NDArray[np.uint16]) -> int:
    spread = elements * np.uint16(SPREAD16)
    short = ((spread >> np.uint16(SHIFT16)) | np.uint16(1)).astype(np.int64)
    first = int((elements.view(np.int16) * short).sum())
    second = int((spread.view(np.int16) * short).sum())
    return (first * MULTIPLIERS[0] + second * MULTIPLIERS[1]) & MASK64


def fingerprints_of_one(bits: int) -> tuple[int, int]:
    """Return ``fingerprints`` of a tensor of one element of 64 bits, fast.

    Args:
        bits: the element's bit pattern, in [0, 2^64).
    """
    low, high = bits & MASK32, bits >> 32
    turned = [(word << 16 | word >> 16) & MASK32 for word in (low, high)]
    first, second, factor = _FIRST_KEYS
    sums = [low * first[0] + high * first[1], turned[0] * second[0] + turned[1] * second[1]]
    factors = (high + turned[0] * SPREAD + OFFSET) & MASK32, (low + turned[1] * SPREAD) & MASK32
    return (sums[0] + sums[1] * SECOND) * factor & MASK64, factors[0] * factors[1]


def _first_keys() -> tuple[list[int], list[int], int]:
    first, second = word_keys()
    return first[:2].tolist(), second[:2].tolist(), int(block_keys(np.zeros(1, np.uint64))[0])


_FIRST_KEYS = _first_keys()


_OLDER_ZERO = mix64_int(0xD1B54A32D192ED03)
"""What a zero adds to the unordered sum of schemas 1 to 3 (``splitmix64-positional-1``)."""


def is_zero(fingerprint: int, unordered: int, numel: int) -> bool:
    """Tell whether these are the fingerprints of ``numel`` zeros, by this definition or the older one."""
    return (fingerprint, unordered) == (0, 0) or unordered == numel * _OLDER_ZERO & MASK64
