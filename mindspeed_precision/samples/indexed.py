"""Megatron's indexed data sets (``PREFIX.bin`` and ``PREFIX.idx``), read without Megatron.

Format: ``megatron/core/datasets/indexed_dataset.py``. The index is ``MMIDIDX``, a version, the code of the
element type, the numbers of sequences and of document boundaries, then for each sequence its length (int32)
and the byte at which it begins (int64), the boundaries (int64) and, of multimodal data, a mode (int8) for
each sequence.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.errors import DumpError

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}


@dataclass(frozen=True, kw_only=True)
class IndexedDataset:
    """An indexed data set; only what is asked for is read.

    Attributes:
        prefix: path without ``.bin`` and ``.idx``.
        dtype: of an element.
        lengths: elements of each sequence.
        starts: byte of ``.bin`` at which each begins.
        documents: sequences at which documents begin, and one beyond the last.
    """

    prefix: Path
    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]
    starts: NDArray[np.int64]
    documents: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths)

    def sequence(self, number: int) -> NDArray[Any]:
        """Return the elements of a sequence."""
        count, start = int(self.lengths[number]), int(self.starts[number])
        with _bin(self.prefix).open("rb") as file:
            file.seek(start)
            data = file.read(count * self.dtype.itemsize)
        return np.frombuffer(data, dtype=self.dtype)

    def windows(self, length: int) -> Iterator[NDArray[Any]]:
        """Yield the stream of all sequences, in order, in windows of ``length + 1`` that share their ends.

        Args:
            length: tokens of a sample; the last one of a window is the label of the one before.
        """
        held: NDArray[Any] = np.empty(0, dtype=self.dtype)
        for number in range(len(self)):
            held = np.concatenate([held, self.sequence(number)])
            while len(held) > length:
                yield held[: length + 1]
                held = held[length:]


def is_indexed(path: Path) -> bool:
    """Tell whether a path names an indexed data set: its prefix, or one of its files."""
    prefix = prefix_of(path)
    return _bin(prefix).is_file() and _idx(prefix).is_file()


def prefix_of(path: Path) -> Path:
    """Return a path without ``.bin`` or ``.idx``."""
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def _bin(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bin")


def _idx(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


def open_indexed(path: Path) -> IndexedDataset:
    """Open an indexed data set.

    Raises:
        DumpError: a file cannot be read, is of another format, or claims more than the files hold.
    """
    prefix = prefix_of(path)
    file = _idx(prefix)
    try:
        size, held = file.stat().st_size, _bin(prefix).stat().st_size
        with file.open("rb") as stream:
            header = stream.read(_HEADER.size)
    except OSError as error:
        raise DumpError(f"cannot read: {error.strerror}", where=str(error.filename or file)) from error
    if len(header) < _HEADER.size or not header.startswith(MAGIC):
        raise DumpError("no index of a Megatron data set", where=str(file), found=repr(header[:9]))
    _, version, code, sequences, documents = _HEADER.unpack(header)
    if version != 1 or code not in _DTYPES:
        found = f"version {version}, type {code}"
        raise DumpError(
            "an index of another format", where=str(file), found=found, expected="version 1, type 1 to 8"
        )
    plain = _HEADER.size + 12 * sequences + 8 * documents
    if size not in (plain, plain + sequences):  # before anything is allocated
        raise DumpError(
            "the index does not hold what its header says",
            where=str(file),
            found=f"{size} bytes",
            expected=f"{plain} bytes for {sequences} sequences and {documents} boundaries",
        )
    return _checked(prefix, _DTYPES[code], sequences, documents, held)


def _checked(prefix: Path, dtype: np.dtype[Any], sequences: int, documents: int, held: int) -> IndexedDataset:
    file, at = _idx(prefix), _HEADER.size
    lengths = np.fromfile(file, dtype="<i4", count=sequences, offset=at)
    starts = np.fromfile(file, dtype="<i8", count=sequences, offset=at + 4 * sequences)
    bounds = np.fromfile(file, dtype="<i8", count=documents, offset=at + 12 * sequences)
    ends = starts + lengths.astype(np.int64) * dtype.itemsize
    bad = np.flatnonzero((lengths < 0) | (starts < 0) | (starts > held) | (ends > held))
    if len(bad):
        number = int(bad[0])
        raise DumpError(
            "a sequence lies outside the data",
            where=f"{_bin(prefix)}, sequence {number}",
            found=f"bytes {int(starts[number])} to {int(ends[number])}",
            expected=f"within {held} bytes",
        )
    return IndexedDataset(prefix=prefix, dtype=dtype, lengths=lengths, starts=starts, documents=bounds)


__all__ = ["MAGIC", "IndexedDataset", "is_indexed", "open_indexed", "prefix_of"]
