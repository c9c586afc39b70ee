"""Digests of the parts of a tensor, or of the terms of a sum, made into that of the whole, in numpy alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mindspeed_precision.record.fingerprint import MASK64
from mindspeed_precision.record.sketch import ROUNDOFF, pack, unpack
from mindspeed_precision.records import Digest, Sketch, Statistics


def merge_digests(digests: Sequence[Digest], sizes: Sequence[int]) -> Digest:
    """Return the digest of a tensor from those of its disjoint parts, which number its elements as it does.

    Fingerprints, counts and extrema are those of the whole, exactly; mean, norm and sketch up to rounding.

    Args:
        digests: of the parts; together they hold every element once.
        sizes: number of elements of each part.
    """
    statistics = [digest.statistics for digest in digests]
    sketches = [digest.sketch for digest in digests]
    known = [one for one in statistics if one is not None]
    taken = [one for one in sketches if one is not None]
    exact = all(digest.exact for digest in digests)
    return Digest(
        fingerprint=sum(digest.fingerprint for digest in digests) & MASK64 if exact else 0,
        unordered=sum(digest.unordered for digest in digests) & MASK64 if exact else 0,
        statistics=_merge_statistics(known, sizes) if len(known) == len(digests) else None,
        sketch=_merge_sketches(taken) if len(taken) == len(digests) else None,
        exact=exact,
    )


def sum_digests(digests: Sequence[Digest]) -> Digest:
    """Return what is known of a sum of tensors from the digests of its terms: their sketches add up.

    Nothing else does: fingerprints and statistics of a sum are not known, but where all of it is zero.

    Args:
        digests: of the terms, which number their elements alike.
    """
    if all(_is_zero(digest.statistics) for digest in digests):
        return digests[0]
    taken = [digest.sketch for digest in digests if digest.sketch is not None]
    sketch = _merge_sketches(taken) if len(taken) == len(digests) else None
    return Digest(fingerprint=0, unordered=0, sketch=sketch, exact=False)


def _is_zero(found: Statistics | None) -> bool:
    return found is not None and not (found.l2_norm or found.nans or found.infs)


def scale_digest(digest: Digest, factor: float) -> Digest:
    """Return the digest of a tensor times a positive number; fingerprints are known for 1 alone.

    The histogram of exponents moves by the factor's own where that is a power of two, and is empty elsewhere.
    """
    if factor == 1.0:
        return digest
    return Digest(
        fingerprint=0,
        unordered=0,
        statistics=None if digest.statistics is None else _scale_statistics(digest.statistics, factor),
        sketch=None if digest.sketch is None else _scale_sketch(digest.sketch, factor),
        exact=False,
    )


def _scale_statistics(found: Statistics, factor: float) -> Statistics:
    mantissa, exponent = math.frexp(factor)
    moved = {bin_ + exponent - 1 if 0 < bin_ < 255 else bin_: n for bin_, n in found.exponents.items()}
    kept = mantissa == 0.5 and all(
        0 < bin_ + exponent - 1 < 255 for bin_ in found.exponents if 0 < bin_ < 255
    )
    return replace(
        found,
        minimum=found.minimum * factor,
        maximum=found.maximum * factor,
        mean=found.mean * factor,
        l2_norm=found.l2_norm * factor,
        exponents=moved if kept else {},
    )


def _scale_sketch(found: Sketch, factor: float) -> Sketch | None:
    return pack(unpack(found) * factor, roundoff=min(found.roundoff + ROUNDOFF, 0.5))


def _merge_statistics(parts: Sequence[Statistics], sizes: Sequence[int]) -> Statistics:
    finite = [size - part.nans - part.infs for part, size in zip(parts, sizes, strict=True)]
    some = [(part, count) for part, count in zip(parts, finite, strict=True) if count]
    exponents: Counter[int] = Counter()
    for part in parts:
        exponents.update(part.exponents)
    return Statistics(
        minimum=min((part.minimum for part, _ in some), default=math.nan),
        maximum=max((part.maximum for part, _ in some), default=math.nan),
        mean=math.fsum(part.mean * count for part, count in some) / sum(finite) if some else math.nan,
        l2_norm=math.hypot(*(part.l2_norm for part in parts)),
        zeros=sum(part.zeros for part in parts),
        nans=sum(part.nans for part in parts),
        infs=sum(part.infs for part in parts),
        exponents=dict(sorted(exponents.items())),
    )


def _merge_sketches(parts: Sequence[Sketch]) -> Sketch | None:
    """Add sketches; their errors add up, and are stated against a sum that may be smaller than its terms."""
    values = [unpack(part) for part in parts]
    total = np.sum(values, axis=0)
    size = float(np.linalg.norm(total))
    error = sum(part.roundoff * float(np.linalg.norm(own)) for part, own in zip(parts, values, strict=True))
    roundoff = ROUNDOFF + (error / size if size else 0.0)
    return pack(total, roundoff=roundoff) if roundoff < 1 else None
