"""Payload files: the safetensors format, written and read with numpy alone.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian length of a JSON header, the
header ``{name: {"dtype", "shape", "data_offsets"}}``, then the elements. The library's own numpy door cannot
hold bfloat16 without another dependency, and its low-level door differs between its versions; a test has the
library read what is written here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump.strict_json import check_keys, load_object
from mindspeed_precision.dump.whole_file import whole_file
from mindspeed_precision.errors import DumpError

_TAGS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "complex64": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex128": "F64",
}
_WIDTHS = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2}
_WIDTHS |= {"U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}
_ENTRY: Mapping[str, tuple[type, ...]] = {"dtype": (str,), "shape": (list,), "data_offsets": (list,)}
_HEADER_LIMIT = 100_000_000
_MOST_DIMENSIONS = 32
"""What every numpy can hold; no tensor of a model has as many."""
_MOST_ELEMENTS = 1 << 59


def representable(shape: Sequence[int]) -> bool:
    """Tell whether an array can have this shape, also where it is empty."""
    return len(shape) <= _MOST_DIMENSIONS and math.prod(size or 1 for size in shape) <= _MOST_ELEMENTS


def tag_of(dtype: str) -> str:
    """Return the safetensors type for ``dtype``; types that the format lacks are stored as bytes (``U8``)."""
    return _TAGS.get(dtype, "U8")


def write_payload(path: Path, tensors: Mapping[str, HostTensor]) -> None:
    """Write a payload file under a temporary name, flush it to the disk, and rename it.

    Args:
        path: the file; replaced if it exists.
        tensors: elements by name; complex ones with their last dimension of size 2.

    Raises:
        OSError: the disk is full or not writable.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].bits.dtype.itemsize)  # keeps each one aligned
    header: dict[str, Any] = {}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].bits.nbytes
        shape = list(tensors[name].bits.shape)
        header[name] = {"dtype": tag_of(tensors[name].dtype), "shape": shape, "data_offsets": [start, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with whole_file(path) as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name in order:
            file.write(np.ascontiguousarray(tensors[name].bits).data)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    tag: str
    shape: tuple[int, ...]
    start: int
    end: int


def _entry(plain: Any, *, where: str) -> _Entry:
    check_keys(plain, _ENTRY, where=where)
    numbers = (*plain["shape"], *plain["data_offsets"])
    well_formed = all(type(number) is int and number >= 0 for number in numbers)
    if plain["dtype"] not in _WIDTHS or len(plain["data_offsets"]) != 2 or not well_formed:
        raise DumpError("ill-formed tensor", where=where, found=str(plain))
    start, end = plain["data_offsets"]
    if not representable(plain["shape"]):
        found = str(plain["shape"][: _MOST_DIMENSIONS + 1])
        raise DumpError("a shape that no tensor has", where=where, found=found)
    size = _WIDTHS[plain["dtype"]] * math.prod(plain["shape"])
    if end - start != size:
        found = f"{end - start} bytes"
        raise DumpError("type and shape do not fit the bytes", where=where, found=found, expected=str(size))
    return _Entry(tag=plain["dtype"], shape=tuple(plain["shape"]), start=start, end=end)


class PayloadFile:
    """A payload file, opened for reading; the header is checked against the file before anything is read.

    Raises:
        DumpError: the file is absent, truncated, or not what the format says.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= min(_HEADER_LIMIT, max(0, size - 8)):
                    raise DumpError(
                        "truncated or no safetensors file",
                        where=str(path),
                        found=f"{size} bytes",
                        expected=f"a header of {length} bytes",
                    )
                head = file.read(length)
        except OSError as error:
            raise DumpError(f"cannot read this payload file: {error.strerror}", where=str(path)) from error
        self._base = 8 + length
        self._entries = self._read_header(head)
        expected = self._base + max((entry.end for entry in self._entries.values()), default=0)
        if size != expected:
            raise DumpError(
                "truncated payload" if size < expected else "trailing bytes in payload",
                where=str(path),
                found=f"{size} bytes",
                expected=f"{expected} bytes",
            )

    def _read_header(self, head: bytes) -> dict[str, _Entry]:
        where = f"{self._path} (header)"
        plain = load_object(head, where=where)
        plain.pop("__metadata__", None)
        entries = {name: _entry(value, where=f"{where}, tensor {name}") for name, value in plain.items()}
        end = 0
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
            if entry.start != end:
                found = f"tensor {name} at byte {entry.start}"
                raise DumpError(
                    "tensors overlap or leave gaps", where=where, found=found, expected=f"byte {end}"
                )
            end = entry.end
        return entries

    @property
    def names(self) -> frozenset[str]:
        """The keys of its tensors."""
        return frozenset(self._entries)

    @property
    def places(self) -> Mapping[str, tuple[str, tuple[int, ...], int]]:
        """Of each tensor its safetensors type, its shape, and at which byte of the file it begins."""
        return {name: (one.tag, one.shape, self._base + one.start) for name, one in self._entries.items()}

    def read(self, name: str, *, dtype: str, shape: tuple[int, ...]) -> HostTensor:
        """Return a tensor.

        Args:
            name: its key in the file.
            dtype: the element type that its record states.
            shape: the logical shape that its record states.

        Raises:
            DumpError: it is not there, or not of that type and shape.
        """
        where = f"{self._path}, tensor {name}"
        entry = self._entries.get(name)
        if entry is None:
            raise DumpError("no such tensor in this payload file", where=where)
        stored = (*shape, 2) if dtype.startswith("complex") else shape
        if (entry.tag, entry.shape) != (tag_of(dtype), stored):
            found, expected = f"{entry.tag}{list(entry.shape)}", f"{tag_of(dtype)}{list(stored)}"
            raise DumpError("payload does not fit its record", where=where, found=found, expected=expected)
        count = (entry.end - entry.start) // _WIDTHS[entry.tag]
        element = np.dtype(f"<u{_WIDTHS[entry.tag]}")
        with self._path.open("rb") as file:
            file.seek(self._base + entry.start)
            bits = np.fromfile(file, dtype=element, count=count)
        if bits.size != count:
            raise DumpError(
                "truncated payload", where=where, found=f"{bits.size} elements", expected=f"{count}"
            )
        return HostTensor(bits=bits.reshape(stored), dtype=dtype)
