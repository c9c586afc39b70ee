"""What the compiled kernel finds, kept as rows of numbers until a step ends, then put into words at once."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.backends.digest_kernel import (
    EXPONENTS,
    INTEGERS,
    SKETCH,
    STATISTICS,
    WITH_SKETCH,
    WORDS,
    DigestKernel,
    Geometry,
)
from mindspeed_precision.record.sketch import ROUNDOFF, pack
from mindspeed_precision.record.statistics import EMPTY
from mindspeed_precision.records import Digest, Statistics

ROWS = 256
"""Rows that are allocated at a time: half a MiB, with sketches one."""


class _Block:
    """Rows of results, in memory that nobody has written to yet.

    Attributes:
        words: ``[ROWS, words]`` uint64, each row a ``struct digest`` of the C source.
        address: of the first row.
        stride: bytes from row to row.
        used: rows that are taken.
    """

    __slots__ = ("address", "stride", "used", "words")

    def __init__(self, words: int) -> None:
        self.words = np.empty((ROWS, words), np.uint64)
        self.address, self.stride = self.words.ctypes.data, self.words.strides[0]
        self.used = 0


@dataclass(slots=True)
class HostDigest:
    """A digest that the kernel has taken.

    Attributes:
        block: where its row is.
        row: which it is.
        numel: elements (two per complex element).
        statistics: the moments are there.
        sketch: the sketch is there.
    """

    block: _Block
    row: int
    numel: int
    statistics: bool
    sketch: bool


class HostDigests:
    """Takes digests of host memory.

    Args:
        kernel: that takes them.
    """

    def __init__(self, kernel: DigestKernel) -> None:
        self.kernel = kernel
        self._lock = threading.Lock()
        self._blocks = {words: _Block(words) for words in (SKETCH, WORDS)}

    def take(self, address: int, geometry: Geometry, *, statistics: bool, sketch: bool) -> HostDigest:
        """Digest the tensor at ``address`` now.

        Args:
            address: of its first element.
            geometry: its shape, strides and element type.
            statistics: also the moments, if the type has numbers.
            sketch: also the sketch, if the type may have one; asked for with statistics only.
        """
        statistics = statistics and geometry.numbers
        sketch = sketch and geometry.sketch
        words = WORDS if sketch else SKETCH
        with self._lock:  # gradients arrive on the threads of several devices
            block = self._blocks[words]
            if block.used == ROWS:
                block = self._blocks[words] = _Block(words)
            row = block.used
            block.used += 1
        wanted = (STATISTICS if statistics else 0) | (WITH_SKETCH if sketch else 0)
        self.kernel.into(address, geometry, wanted, block.address + row * block.stride)
        return HostDigest(block, row, geometry.numel, statistics, sketch)


def digests_of(handles: Sequence[HostDigest]) -> list[Digest]:
    """Return what was found, in order."""
    by_block: dict[int, list[int]] = {}
    for place, handle in enumerate(handles):
        by_block.setdefault(id(handle.block), []).append(place)
    digests: dict[int, Digest] = {}
    for places in by_block.values():
        digests.update(zip(places, _of_block([handles[place] for place in places]), strict=True))
    return [digests[place] for place in range(len(handles))]


def _of_block(handles: list[HostDigest]) -> list[Digest]:
    words = handles[0].block.words[[handle.row for handle in handles]]
    integers = words[:, :INTEGERS].tolist()
    floats = words[:, INTEGERS:EXPONENTS].view(np.float64).tolist()
    exponents = _histograms(words[:, EXPONENTS:SKETCH])
    rows = zip(handles, words, integers, floats, exponents, strict=True)
    return [_digest(handle, *row) for handle, *row in rows]


def _histograms(counts: NDArray[np.uint64]) -> list[dict[int, int]]:
    """Return the bins that are not empty, of each row of ``counts`` ``[n, 256]``."""
    rows, bins = counts.nonzero()
    ends = np.searchsorted(rows, np.arange(len(counts) + 1)).tolist()
    numbers, found = bins.tolist(), counts[rows, bins].tolist()
    return [dict(zip(numbers[a:b], found[a:b], strict=True)) for a, b in pairwise(ends)]


def _digest(
    handle: HostDigest,
    words: NDArray[np.uint64],
    integers: list[int],
    floats: list[float],
    exponents: dict[int, int],
) -> Digest:
    if not handle.numel:
        return Digest(fingerprint=0, unordered=0, statistics=EMPTY if handle.statistics else None)
    ordered, unordered, zeros, nans, infs = integers
    if not handle.statistics:
        return Digest(fingerprint=ordered, unordered=unordered)
    low, high, total, squares = floats
    finite = handle.numel - nans - infs
    moments = Statistics(
        minimum=low + 0.0 if finite else math.nan,
        maximum=high + 0.0 if finite else math.nan,
        mean=total / finite + 0.0 if finite else math.nan,
        l2_norm=math.sqrt(squares),
        zeros=zeros,
        nans=nans,
        infs=infs,
        exponents=exponents,
    )
    sketch = pack(words[SKETCH:].view(np.float64), roundoff=ROUNDOFF) if handle.sketch else None
    return Digest(fingerprint=ordered, unordered=unordered, statistics=moments, sketch=sketch)
