"""Statistics and whole digests of host data, in numpy alone: the definition that backends follow."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.record.elements import to_numbers
from mindspeed_precision.record.fingerprint import fingerprints, fingerprints_of_one
from mindspeed_precision.record.sketch import sketch_host
from mindspeed_precision.records import Digest, Statistics

EMPTY = Statistics(minimum=math.nan, maximum=math.nan, mean=math.nan, l2_norm=0.0, zeros=0, nans=0, infs=0)
"""Statistics of a tensor without elements."""


def statistics_of(numbers: NDArray[Any]) -> Statistics:
    """Return the moments of ``numbers``.

    Minimum, maximum, mean and norm are over the finite elements, accumulated in float64 (integers are
    converted first); the counts and the histogram are exact. Real and imaginary parts count as elements.

    Args:
        numbers: ``[...]`` real numbers.
    """
    if not numbers.size:
        return EMPTY
    # a sum beyond float64 is an infinity, a signalling NaN a NaN: both are results here, not events
    with np.errstate(over="ignore", invalid="ignore"):
        single = numbers.astype(np.float32)
        wide = numbers.astype(np.float64)
        finite = wide[np.isfinite(wide)]
        total = float(finite.sum())
        squares = float(np.square(finite).sum())
    exponents = np.bincount(((single.view(np.uint32) >> 23) & 0xFF).ravel().astype(np.int64), minlength=256)
    return Statistics(
        minimum=float(finite.min()) + 0.0 if finite.size else math.nan,  # a zero is +0.0, whichever was met
        maximum=float(finite.max()) + 0.0 if finite.size else math.nan,
        mean=total / finite.size + 0.0 if finite.size else math.nan,
        l2_norm=math.sqrt(squares),
        zeros=int((wide == 0).sum()),
        nans=int(np.isnan(wide).sum()),
        infs=int(np.isinf(wide).sum()),
        exponents={int(b): int(exponents[b]) for b in np.flatnonzero(exponents)},
    )


def statistics_from(
    moments: Sequence[float], *, numel: int, zeros: int, nans: int, infs: int, exponents: Mapping[int, int]
) -> Statistics:
    """Return the statistics of what was summed elsewhere.

    Args:
        moments: minimum, maximum, sum and sum of squares of the finite elements.
        numel: number of elements, at least one.
        zeros: number of zeros.
        nans: number of NaNs.
        infs: number of infinities.
        exponents: number of elements by exponent.
    """
    low, high, total, squares = moments
    finite = numel - nans - infs
    return Statistics(
        minimum=low + 0.0 if finite else math.nan,  # a zero is +0.0, whichever was met
        maximum=high + 0.0 if finite else math.nan,
        mean=total / finite + 0.0 if finite else math.nan,
        l2_norm=math.sqrt(squares),
        zeros=zeros,
        nans=nans,
        infs=infs,
        exponents=exponents,
    )


def digest_host(
    host: HostTensor, *, statistics: bool, sketch: bool = False, index: NDArray[np.int64] | None = None
) -> Digest:
    """Return the digest of a tensor on the host.

    Args:
        host: the tensor.
        statistics: also the moments.
        sketch: also the sketch.
        index: canonical index of each element, for a shard of a larger tensor; None: it is whole.

    Raises:
        IncomparableError: more than fingerprints was asked for and the element type has no known numbers.
    """
    ordered, unordered = fingerprints(host.bits, index=index)
    return Digest(
        fingerprint=ordered,
        unordered=unordered,
        statistics=statistics_of(to_numbers(host)) if statistics else None,
        sketch=sketch_host(host, index=index) if sketch else None,
    )


def float64_bits(value: float) -> int:
    """Return the bit pattern of ``value`` as float64, NaN payload and sign of zero included."""
    return int.from_bytes(struct.pack("<d", value), "little")


def digest_number(value: float) -> Digest:
    """Return the digest, with statistics, of a 0-dimensional float64 tensor, fast."""
    ordered, unordered = fingerprints_of_one(float64_bits(value))
    return Digest(fingerprint=ordered, unordered=unordered, statistics=_statistics_of_one(value))


def _statistics_of_one(value: float) -> Statistics:
    finite = math.isfinite(value)
    moment = value + 0.0 if finite else math.nan
    return Statistics(
        minimum=moment,
        maximum=moment,
        mean=moment,
        l2_norm=abs(value) if finite else 0.0,
        zeros=int(value == 0),
        nans=int(math.isnan(value)),
        infs=int(math.isinf(value)),
        exponents={_float32_exponent(value): 1},
    )


def _float32_exponent(value: float) -> int:
    try:
        bits = int.from_bytes(struct.pack("<f", value), "little")
    except OverflowError:  # beyond float32, where a conversion gives an infinity
        return 255
    return (bits >> 23) & 0xFF
