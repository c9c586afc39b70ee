"""What the compiled kernel writes, ``struct digest`` of its source, decoded for many tensors at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.record.sketch import BUCKETS, ROUNDOFF, pack
from mindspeed_precision.record.statistics import EMPTY, statistics_from
from mindspeed_precision.records import Digest

_INTEGERS, _FLOATS, _PROBES, _BINS = 5, 4, 8, 256
_NUMBERS = _INTEGERS + _FLOATS
_EXPONENTS = _NUMBERS + _PROBES

WORDS = _EXPONENTS + _BINS
"""Words of 64 bits: five integers, four numbers, eight words of the tensor, 256 counts of exponents."""

WORDS_WITH_SKETCH = WORDS + BUCKETS
"""And 256 numbers of the sketch."""


@dataclass(slots=True)
class Contents:
    """What a row of words is of.

    Attributes:
        numel: elements (two per complex element).
        statistics: the moments are there.
        sketch: the sketch is there.
    """

    numel: int
    statistics: bool
    sketch: bool


def digests_of(words: NDArray[np.uint64], contents: Sequence[Contents]) -> list[Digest]:
    """Return the digests in ``words``, ``[n, WORDS]`` or, with sketches, ``[n, WORDS_WITH_SKETCH]``."""
    integers = words[:, :_INTEGERS].tolist()
    floats = words[:, _INTEGERS:_NUMBERS].view(np.float64).tolist()
    exponents = _histograms(words[:, _EXPONENTS:WORDS])
    rows = zip(contents, words, integers, floats, exponents, strict=True)
    return [_digest(*row) for row in rows]


def _histograms(counts: NDArray[np.uint64]) -> list[dict[int, int]]:
    """Return the bins that are not empty, of each row of ``counts`` ``[n, 256]``."""
    rows, bins = counts.nonzero()
    ends = np.searchsorted(rows, np.arange(len(counts) + 1)).tolist()
    numbers, found = bins.tolist(), counts[rows, bins].tolist()
    return [dict(zip(numbers[a:b], found[a:b], strict=True)) for a, b in pairwise(ends)]


def _digest(
    of: Contents,
    words: NDArray[np.uint64],
    integers: list[int],
    floats: list[float],
    exponents: dict[int, int],
) -> Digest:
    if not of.numel:
        return Digest(fingerprint=0, unordered=0, statistics=EMPTY if of.statistics else None)
    ordered, unordered, zeros, nans, infs = integers
    if not of.statistics:
        return Digest(fingerprint=ordered, unordered=unordered)
    moments = statistics_from(floats, numel=of.numel, zeros=zeros, nans=nans, infs=infs, exponents=exponents)
    sketch = pack(words[WORDS:].view(np.float64), roundoff=ROUNDOFF) if of.sketch else None
    return Digest(fingerprint=ordered, unordered=unordered, statistics=moments, sketch=sketch)
