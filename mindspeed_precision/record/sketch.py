"""The sketch: 256 numbers, linear in a tensor, of which distances between tensors can be estimated.

This module is the definition, in numpy alone (``docs/dump-format.md`` says the same in prose); backends
compute the same numbers, up to rounding, on the device. Element i, with its index ``g`` in C order in the
canonical tensor, is added to one bucket with a sign, both drawn by ``mix64``::

    sign(g) = -1 where bit g mod 64 of mix64(g div 64 + SIGN_SEED) is set
    turn(g) = mix64(g div 256 + TURN_SEED) mod 256         bucket(g) = (g + turn(g)) mod 256

Every sign is a bit of its own, so signs are as independent as the bits of ``mix64`` are, and 64 of them cost
one call. 256 neighbours never share a bucket, and elements further apart do with a chance of 1 / 256,
whatever the width of the tensor: a wrong column, which is periodic, spreads over all buckets. A sum does not
care about order except for rounding, so the sketch does not depend on strides, and sketches of disjoint
shards add up. The shape is not part of it.

A count sketch (M. Charikar, K. Chen, M. Farach-Colton, *Finding frequent items in data streams*, 2002). For a
difference x of two tensors ``‖sketch(x)‖²`` has, over the hash, the mean ‖x‖² and a variance of at most
``2 / 256 · ‖x‖⁴`` (``docs/adr/0006-sketches-by-position.md``).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.record.elements import to_numbers
from mindspeed_precision.record.fingerprint import CHUNK, mix64
from mindspeed_precision.records import Sketch

ALGORITHM = "count-sketch-256-2"
"""Name of this definition, written into every dump; a changed definition gets another name."""

SIGN_SEED = 0xABC98388FB8FAC03
TURN_SEED = 0x9E3779B97F4A7C15

BUCKETS = 256

ROUNDOFF = 2.0**-28
"""Relative error of a sketch that was summed in float64: one rounding to ``BYTES``, and as much for the sum.

The rounding is below 2^-29. A sum of n numbers in float64 is off by about sqrt(n) · 2^-53: less than that for
any tensor that fits into a memory.
"""

SINGLE_ROUNDOFF = 2.0**-18
"""The same where a device has no float64: 4096 additions of float32, as in ``backends.torch_digest``."""

BYTES = 5
"""Of each number in a record: sign, exponent and the upper 28 bits of the mantissa of a float64."""

_DROPPED = np.uint64(8 * (8 - BYTES))


def has_sketch(dtype: str, elements: int) -> bool:
    """Tell whether a tensor gets a sketch: no tolerance is for integers, and one number is in the statistics.

    Args:
        dtype: framework-neutral name.
        elements: number of elements.
    """
    return elements > 1 and dtype.startswith(("float", "bfloat", "complex"))


def sketch_values(numbers: NDArray[Any], *, index: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
    """Return the sketch of a tensor, summed in float64. Elements that are not finite count as zero.

    Args:
        numbers: ``[...]`` real numbers; complex elements as two, real then imaginary, in a last dimension.
        index: canonical index of each element, for a shard of a larger tensor; same number of elements. None:
            the tensor is whole, and an element's index is its position in C order.

    Returns:
        ``[256]``. Sketches of the shards of a tensor add up to its own.
    """
    assert index is None or index.size == numbers.size
    flat = numbers.reshape(-1)
    total = np.zeros(BUCKETS)
    for start in range(0, flat.size, CHUNK):
        with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN
            piece = flat[start : start + CHUNK].astype(np.float64)
        if index is None:
            buckets, signs = _whole(start // CHUNK)
        else:
            buckets, signs = _places(index.reshape(-1)[start : start + CHUNK].astype(np.uint64))
        piece[~np.isfinite(piece)] = 0.0
        piece *= signs[: piece.size]
        with np.errstate(over="ignore", invalid="ignore"):  # beyond float64: `pack` refuses it
            total += np.bincount(buckets[: piece.size], weights=piece, minlength=BUCKETS)
    return total


def sketch_host(host: HostTensor, *, index: NDArray[np.int64] | None = None) -> Sketch | None:
    """Return the sketch of a tensor on the host; None where it gets none (``has_sketch``, ``pack``).

    Args:
        host: the tensor.
        index: as for ``sketch_values``.

    Raises:
        IncomparableError: the element type has no known numbers.
    """
    if not has_sketch(host.dtype, host.bits.size):
        return None
    return pack(sketch_values(to_numbers(host), index=index), roundoff=ROUNDOFF)


def turns(blocks: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return by how many buckets each block of 256 elements is turned, 0 to 255."""
    turned: NDArray[np.uint64] = mix64(blocks + np.uint64(TURN_SEED)) & np.uint64(BUCKETS - 1)
    return turned


def _places(index: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int8]]:
    buckets = (index + turns(index >> np.uint64(8))) & np.uint64(BUCKETS - 1)
    drawn = mix64((index >> np.uint64(6)) + np.uint64(SIGN_SEED))
    negative = (drawn >> (index & np.uint64(63))) & np.uint64(1)
    return buckets.astype(np.int64), (1 - 2 * negative.astype(np.int8)).astype(np.int8)


@lru_cache(maxsize=4)
def _whole(chunk: int) -> tuple[NDArray[np.int64], NDArray[np.int8]]:
    """Return buckets and signs of one chunk of a whole tensor: most tensors are not larger (9 MiB each)."""
    return _places(np.arange(chunk * CHUNK, (chunk + 1) * CHUNK, dtype=np.uint64))


def pack(values: NDArray[np.float64], *, roundoff: float) -> Sketch | None:
    """Round a sketch to ``BYTES`` each; None where a sum is beyond float64.

    Args:
        values: ``[256]``.
        roundoff: relative error that the sketch has then.
    """
    half = np.uint64(1 << (int(_DROPPED) - 1))
    bits = np.ascontiguousarray(values, dtype="<f8").view("<u8")
    rounded = (bits + half) >> _DROPPED
    kept = np.ascontiguousarray(rounded, dtype="<u8").view(np.uint8).reshape(BUCKETS, 8)[:, :BYTES]
    sketch = Sketch(data=kept.tobytes(), roundoff=roundoff)
    return sketch if np.isfinite(values).all() and np.isfinite(unpack(sketch)).all() else None


def unpack(sketch: Sketch) -> NDArray[np.float64]:
    """Return the 256 numbers of a sketch."""
    wide = np.zeros((BUCKETS, 8), np.uint8)
    wide[:, 8 - BYTES :] = np.frombuffer(sketch.data, np.uint8).reshape(BUCKETS, BYTES)
    return wide.view("<f8").reshape(BUCKETS).astype(np.float64)
