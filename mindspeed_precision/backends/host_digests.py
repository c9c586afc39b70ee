"""Digests that the compiled kernel takes during a step, kept as rows of words until the step ends."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_precision.backends.digest_kernel import BITS_ONLY, DigestKernel, Geometry
from mindspeed_precision.backends.digest_words import WORDS, WORDS_WITH_SKETCH, Contents, digests_of
from mindspeed_precision.records import Digest

ROWS = 256
"""Rows that are allocated at a time: half a MiB, with sketches one."""


class _Block:
    """Rows of words, in memory that nobody has written to yet.

    Attributes:
        words: ``[ROWS, n]`` uint64.
        address: of the first row.
        stride: bytes from row to row.
        used: rows that are taken.
    """

    __slots__ = ("address", "stride", "used", "words")

    def __init__(self, width: int) -> None:
        self.words = np.empty((ROWS, width), np.uint64)
        self.address, self.stride = self.words.ctypes.data, self.words.strides[0]
        self.used = 0


@dataclass(slots=True)
class HostDigest:
    """A digest that was taken: ``row`` of ``block``, and what it is of."""

    block: _Block
    row: int
    contents: Contents


class HostDigests:
    """Takes digests of host memory.

    Args:
        kernel: that takes them.
    """

    def __init__(self, kernel: DigestKernel) -> None:
        self._kernel = kernel
        self._lock = threading.Lock()
        self._blocks = {width: _Block(width) for width in (WORDS, WORDS_WITH_SKETCH)}

    def take(self, address: int, geometry: Geometry, *, statistics: bool, sketch: bool) -> HostDigest:
        """Digest the tensor at ``address`` now.

        Args:
            address: of its first element.
            geometry: its shape, strides and element type.
            statistics: also the moments, if the type has numbers.
            sketch: also the sketch, if the tensor has one; asked for with statistics only.
        """
        reading, numel = geometry.reading, geometry.numel
        statistics = statistics and reading.kind != BITS_ONLY
        sketch = sketch and statistics and reading.floating and numel > 1
        width = WORDS_WITH_SKETCH if sketch else WORDS
        with self._lock:  # gradients arrive on the threads of several devices
            block = self._blocks[width]
            if block.used == ROWS:
                block = self._blocks[width] = _Block(width)
            row = block.used
            block.used += 1
        out = block.address + row * block.stride
        self._kernel.into(address, geometry, out, statistics=statistics, sketch=sketch)
        return HostDigest(block, row, Contents(numel, statistics, sketch))


def finished(handles: Sequence[HostDigest]) -> list[Digest]:
    """Return what was found, in order."""
    by_block: dict[int, list[int]] = {}
    for place, handle in enumerate(handles):
        by_block.setdefault(id(handle.block), []).append(place)
    digests: dict[int, Digest] = {}
    for places in by_block.values():
        taken = [handles[place] for place in places]
        words = taken[0].block.words[[handle.row for handle in taken]]
        digests.update(zip(places, digests_of(words, [handle.contents for handle in taken]), strict=True))
    return [digests[place] for place in range(len(handles))]
