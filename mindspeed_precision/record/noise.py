"""Relative noise of one rounding, by canonical element: the same whatever the layout of the run.

Element ``g`` (index in C order in the canonical tensor) of parameter ``name`` becomes
``w · (1 + sign(g) · epsilon)``, rounded to its dtype. The sign is drawn by the hash of the fingerprint from
the seed, the name and ``g``. In numpy alone.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.record.elements import UNIT_ROUNDOFF, to_bits, to_numbers
from mindspeed_precision.record.fingerprint import MASK64, WORD_SEED, mix64, mix64_int


def signs(name: str, seed: int, index: NDArray[np.int64]) -> NDArray[np.int8]:
    """Return the sign of the noise of some elements.

    Args:
        name: canonical name of the parameter.
        seed: of the noise; another one draws other signs.
        index: ``[n]`` canonical numbers of the elements.

    Returns:
        ``[n]`` of -1 and 1.
    """
    start = mix64_int((WORD_SEED + seed) & MASK64) ^ zlib.crc32(name.encode())
    keys = mix64(index.astype(np.uint64) ^ np.uint64(mix64_int(start)))
    drawn: NDArray[np.int8] = 1 - 2 * (keys >> np.uint64(63)).astype(np.int8)
    return drawn


def perturbed(
    host: HostTensor, index: NDArray[np.int64], *, name: str, seed: int, epsilon: float | None
) -> HostTensor:
    """Return a tensor with relative noise; elements that are zero or not finite stay as they are.

    Args:
        host: ``[...]`` of a floating dtype of ``UNIT_ROUNDOFF``.
        index: canonical numbers of its elements in C order.
        name: canonical name of the parameter.
        seed: of the noise.
        epsilon: size of the noise; None: the unit roundoff of the dtype, so that an element moves by one unit
            in its last place (or, where a tie rounds back, not at all).
    """
    size = UNIT_ROUNDOFF[host.dtype] if epsilon is None else epsilon
    numbers: NDArray[Any] = to_numbers(host).astype(np.float64)
    noise = signs(name, seed, index.reshape(-1)).reshape(numbers.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        moved = numbers * (1.0 + size * noise)
    bits = np.where(np.isfinite(numbers), to_bits(moved, host.dtype), host.bits)
    return HostTensor(bits=bits, dtype=host.dtype)
