"""The fingerprint: 64 bits that are equal exactly when the elements of a tensor are, bit by bit and in place.

This module is the definition, in numpy alone (``docs/dump-format.md`` says the same in prose); backends
compute the same number on the device. With all arithmetic modulo 2^64::

    fingerprint = Σ_i mix64(mix64(g_i + SEED) ^ bits_i)        unordered = Σ_i mix64(bits_i ^ UNORDERED_KEY)

where ``bits_i`` is the bit pattern of element i, zero-extended to 64 bits, and ``g_i`` its index in C order
in the canonical tensor. A sum does not care about order of evaluation, so the value does not depend on
strides, chunks or threads, and fingerprints of disjoint shards of one tensor add up.

Two elements of the same value but different bits differ: ``-0.0`` is not ``+0.0``, and NaNs with different
payloads are different. The shape is not part of the value: a reshape keeps the fingerprint.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

ALGORITHM = "splitmix64-positional-1"
"""Name of this definition, written into every dump; a changed definition gets another name."""

SEED = 0x9E3779B97F4A7C15
UNORDERED_KEY = 0xD1B54A32D192ED03
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
MASK64 = (1 << 64) - 1

CHUNK = 1 << 20
"""Elements per pass: temporary memory is a few times 8 MiB, whatever the tensor's size."""


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
        elements = piece.astype(np.uint64)
        places = np.arange(start, stop, dtype=np.uint64) if index is None else _places(index, start, stop)
        keys = mix64(places + np.uint64(SEED))
        ordered += int(mix64(keys ^ elements).sum(dtype=np.uint64))
        unordered += int(mix64(elements ^ np.uint64(UNORDERED_KEY)).sum(dtype=np.uint64))
    return ordered & MASK64, unordered & MASK64


def _places(index: NDArray[np.int64], start: int, stop: int) -> NDArray[np.uint64]:
    return np.asarray(index.flat[start:stop]).astype(np.uint64)


def fingerprints_of_one(bits: int) -> tuple[int, int]:
    """Return ``fingerprints`` of a tensor of one element, fast.

    Args:
        bits: the element's bit pattern, zero-extended, in [0, 2^64).
    """
    return mix64_int(mix64_int(SEED) ^ bits), mix64_int(bits ^ UNORDERED_KEY)
