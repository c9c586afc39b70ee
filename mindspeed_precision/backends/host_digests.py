"""Digests that the compiled kernel takes during a step, kept as rows of words until the step ends.

What is looked at again (a module's output is the next one's input) is read again: nothing but its memory
says what it holds, since a write may count no version. Reading tells whether it still has the fingerprint
that it had; then the statistics and the sketch are those it had.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_precision.backends.digest_geometry import BITS_ONLY, Geometry, Identity
from mindspeed_precision.backends.digest_kernel import DigestKernel
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
    """A digest that was taken: ``row`` of ``block``, at ``address``, and what it is of."""

    block: _Block
    row: int
    address: int
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
        self._latest: dict[tuple[int, bool, bool, Identity], HostDigest] = {}

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
        if geometry.identity is None:
            return self._take(address, geometry, Contents(numel, statistics, sketch))
        place = address, statistics, sketch, geometry.identity
        prior = self._latest.get(place)
        if prior is not None and self._kernel.repeats(address, geometry, prior.address):
            return prior
        taken = self._latest[place] = self._take(address, geometry, Contents(numel, statistics, sketch))
        return taken

    def _take(self, address: int, geometry: Geometry, contents: Contents) -> HostDigest:
        width = WORDS_WITH_SKETCH if contents.sketch else WORDS
        with self._lock:  # gradients arrive on the threads of several devices
            block = self._blocks[width]
            if block.used == ROWS:
                block = self._blocks[width] = _Block(width)
            row = block.used
            block.used += 1
        out = block.address + row * block.stride
        self._kernel.into(address, geometry, out, statistics=contents.statistics, sketch=contents.sketch)
        return HostDigest(block, row, out, contents)

    def finish(self, handles: Sequence[HostDigest]) -> list[Digest]:
        """Return what was found, in order; what was found twice is one object."""
        self._latest.clear()
        return finished(handles)


def finished(handles: Sequence[HostDigest]) -> list[Digest]:
    """Return what was found, in order; what was found twice is one object."""
    by_block: dict[int, dict[int, HostDigest]] = {}
    for handle in handles:
        by_block.setdefault(id(handle.block), {})[handle.row] = handle
    digests: dict[int, Digest] = {}
    for rows in by_block.values():
        taken = list(rows.values())
        words = taken[0].block.words[list(rows)]
        found = digests_of(words, [handle.contents for handle in taken])
        digests.update(zip((handle.address for handle in taken), found, strict=True))
    return [digests[handle.address] for handle in handles]
