"""What ``torch.save`` writes: a zip archive of one pickle and the storages that it names."""

from __future__ import annotations

import io
import math
import struct
import zipfile
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.errors import CheckpointError
from mindspeed_precision.record.elements import width_of
from mindspeed_precision.torch_archive.mapped import MappedFile
from mindspeed_precision.torch_archive.names import STORAGES, TYPES
from mindspeed_precision.torch_archive.opcodes import TensorReference, read_pickle

MAGIC = b"PK\x03\x04"
_LOCAL_HEADER = 30


class TorchArchive:
    """A file of ``torch.save``, or a part of a file that is one.

    Args:
        file: the file.
        start: where the archive begins in it.
        length: how long it is; None: to the end.

    Raises:
        CheckpointError: it is no such archive, or is damaged.
    """

    def __init__(self, file: MappedFile, start: int = 0, length: int | None = None) -> None:
        self._file, self._start = file, start
        self._length = file.size - start if length is None else length
        self.where = str(file.path) if length is None else f"{file.path} (bytes from {start})"
        file.bytes(start, min(4, self._length))
        try:
            with zipfile.ZipFile(_Window(file, start, self._length)) as archive:
                self._entries = {info.filename: info for info in archive.infolist()}
        except (zipfile.BadZipFile, ValueError, struct.error, LookupError, OSError, NotImplementedError) as e:
            raise CheckpointError(
                "no readable archive of torch.save",
                where=self.where,
                found=" ".join(str(e).split()) or type(e).__name__,
                remedy="of an old format: load it with torch and save it again",
            ) from e
        self._prefix = self._find_prefix()
        self._require_little_endian()

    def _find_prefix(self) -> str:
        found = [name for name in self._entries if name.endswith("/data.pkl") or name == "data.pkl"]
        if len(found) != 1:
            raise CheckpointError(
                "a zip archive, but none of torch.save", where=self.where, expected="one data.pkl"
            )
        return found[0].removesuffix("data.pkl")

    def _require_little_endian(self) -> None:
        name = f"{self._prefix}byteorder"
        order = self._bytes(name) if name in self._entries else b"little"
        if order != b"little":
            raise CheckpointError("saved on a big-endian machine", where=self.where, found=repr(order[:16]))

    @cached_property
    def root(self) -> Any:
        """The object that was saved; tensors as ``TensorReference``."""
        return read_pickle(self._bytes(f"{self._prefix}data.pkl"), where=f"{self.where} (data.pkl)")

    def dtype(self, tensor: TensorReference) -> str:
        """Return the name of a tensor's element type; empty where it is none that is known here."""
        return TYPES.get(tensor.dtype, "") if tensor.dtype else STORAGES.get(tensor.storage.kind, "")

    def elements(self, tensor: TensorReference) -> NDArray[Any]:
        """Return a tensor's elements as unsigned integers, ``[...]`` of its shape, a view where it is dense.

        Raises:
            CheckpointError: its storage is not there, or has not the elements that it names.
        """
        width = width_of(self.dtype(tensor))
        start, size = self._place(f"{self._prefix}data/{tensor.storage.key}")
        there, numel = size // width, math.prod(tensor.shape)
        steps = zip(tensor.shape, tensor.stride, strict=True)
        last = tensor.offset + sum((length - 1) * step for length, step in steps) + 1 if numel else 0
        if last > there or numel > there:
            raise CheckpointError(
                "a tensor larger than its storage",
                where=self.where,
                found=f"{there} elements",
                expected=f"{max(last, numel)} for shape {list(tensor.shape)}",
            )
        flat = self._file.elements(start, there, width)
        if tensor.stride == _dense(tensor.shape):
            return flat[tensor.offset : tensor.offset + numel].reshape(tensor.shape)
        strides = tuple(step * width for step in tensor.stride)
        return np.lib.stride_tricks.as_strided(flat[tensor.offset :], tensor.shape, strides, writeable=False)

    def _bytes(self, name: str) -> bytes:
        start, size = self._place(name)
        return self._file.bytes(start, size)

    def _place(self, name: str) -> tuple[int, int]:
        """Return where an entry's bytes are in the file, and how many; entries are never compressed."""
        info = self._entries.get(name)
        if info is None:
            raise CheckpointError("an archive without a part that it names", where=self.where, expected=name)
        if (
            info.compress_type != zipfile.ZIP_STORED
            or info.flag_bits & 1
            or info.file_size != info.compress_size
        ):
            raise CheckpointError(
                "a compressed or encrypted entry, as torch.save writes none", where=f"{self.where}: {name}"
            )
        header = self._file.bytes(self._start + info.header_offset, _LOCAL_HEADER)
        if header[:4] != MAGIC:
            raise CheckpointError("a damaged archive", where=f"{self.where}: {name}")
        lengths = struct.unpack("<HH", header[26:30])
        start = info.header_offset + _LOCAL_HEADER + sum(lengths)
        if start + info.file_size > self._length:
            raise CheckpointError(
                "a truncated archive", where=f"{self.where}: {name}", expected=f"{info.file_size} bytes"
            )
        return self._start + start, info.file_size


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


class _Window(io.RawIOBase):
    """A part of a file as a file, for ``zipfile``."""

    def __init__(self, file: MappedFile, start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("a place before the beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        rest = max(0, self._length - self._at)
        count = rest if size is None or size < 0 else min(size, rest)
        found = self._file.bytes(self._start + self._at, count)
        self._at += count
        return found


__all__ = ["MAGIC", "TorchArchive"]
