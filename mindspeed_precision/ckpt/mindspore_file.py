"""MindSpore's ``.ckpt``: a protocol buffer, read by a small reader of the wire format.

``Checkpoint { repeated Value value = 1; }``, ``Value { string tag = 1; TensorProto tensor = 2;
MapTensorProto maptensor = 3; }``, ``TensorProto { repeated int64 dims = 1;
string tensor_type = 2; bytes tensor_content = 3; }`` (``checkpoint.proto`` of MindSpore). A parameter larger
than half a gigabyte is several values of one tag, one after another. With ``crc_check`` the text ``crc_num``
and ten bytes follow.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_precision.ckpt.mindspore_names import sorted_out
from mindspeed_precision.ckpt.stored import Bits, Checkpoint, Stored
from mindspeed_precision.errors import CheckpointError
from mindspeed_precision.record.elements import width_of
from mindspeed_precision.torch_archive.mapped import MappedFile

_TYPES = {
    **{
        "Float32": "float32",
        "Float16": "float16",
        "BFloat16": "bfloat16",
        "Float64": "float64",
        "Bool": "bool",
    },
    **{f"{kind}{bits}": f"{kind.lower()}{bits}" for kind in ("Int", "UInt") for bits in (8, 16, 32, 64)},
    **{"Float8E4M3FN": "float8_e4m3fn", "Float8E5M2": "float8_e5m2"},
}
_CRC = b"crc_num"
_CRC_BYTES = 10
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_LONGEST_NAME = 1 << 16


@dataclass(kw_only=True)
class _Value:
    """One parameter, in one or several slices."""

    tag: str
    kind: str
    dims: tuple[int, ...]
    places: list[tuple[int, int]] = field(default_factory=list)


def read_mindspore(path: Path, given: str) -> Checkpoint:
    """Read a ``.ckpt`` of MindSpore.

    Raises:
        CheckpointError: it is damaged, encrypted, or none.
    """
    file = MappedFile(path)
    end, notes = _end(file)
    unread: list[str] = []
    table: dict[str, Stored] = {}
    numbers: dict[str, Any] = {}
    for value in _values(file, end):
        stored = _stored(file, value)
        if value.kind == "str":
            numbers[value.tag] = _text(file, value)
        elif stored is None:
            unread.append(f"{value.tag}: element type {value.kind!r}")
        elif value.tag in table:
            raise CheckpointError("a parameter twice", where=str(path), found=value.tag)
        else:
            table[value.tag] = stored
    found = sorted_out(table, mindspore=True)
    return Checkpoint(
        path=given,
        form="MindSpore ckpt",
        family="mindspore",
        tensors=found.tensors,
        states=found.states,
        rest={**found.numbers, **numbers},
        unread=tuple(unread),
        notes=tuple(notes),
    )


def _end(file: MappedFile) -> tuple[int, list[str]]:
    """Return where the message ends; with a checksum behind it, checked."""
    tail = len(_CRC) + _CRC_BYTES
    if file.size < tail or file.bytes(file.size - tail, len(_CRC)) != _CRC:
        return file.size, []
    end = file.size - tail
    stated = int.from_bytes(file.bytes(end + len(_CRC), _CRC_BYTES), "big")
    found = 0
    for start in range(0, end, 1 << 24):
        found = zlib.crc32(file.bytes(start, min(1 << 24, end - start)), found)
    if stated != found:
        raise CheckpointError(
            "a damaged checkpoint: its checksum is another",
            where=str(file.path),
            found=str(found),
            expected=str(stated),
        )
    return end, ["its checksum was checked"]


def _values(file: MappedFile, end: int) -> Iterator[_Value]:
    last: _Value | None = None
    for number, start, stop in _fields(file, 0, end):
        if number != 1:
            raise _damaged(file, start)
        value = _value(file, start, stop)
        if last is not None and last.tag == value.tag and (last.kind, last.dims) == (value.kind, value.dims):
            last.places += value.places
            continue
        if last is not None:
            yield last
        last = value
    if last is None:
        raise CheckpointError("a checkpoint without values", where=str(file.path))
    yield last


def _value(file: MappedFile, start: int, stop: int) -> _Value:
    tag, tensor = "", None
    for number, first, last in _fields(file, start, stop):
        if number == 1:
            tag = _name(file, first, last)
        elif number == 2:
            tensor = first, last
        elif number == 3:
            raise CheckpointError("a map tensor: not read", where=f"{file.path}: {tag}")
    if not tag or tensor is None:
        raise _damaged(file, start)
    value = _Value(tag=tag, kind="", dims=())
    dims: list[int] = []
    for number, first, last in _fields(file, *tensor):
        if number == 1:
            dims += _dims(file, first, last)
        elif number == 2:
            value.kind = _name(file, first, last)
        elif number == 3:
            value.places.append((first, last - first))
    value.dims = tuple(dims)
    return value


def _fields(file: MappedFile, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield field number, and where its content begins and ends; of a number, the number's bytes."""
    at = start
    while at < stop:
        key, at = _varint(file, at, stop)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            first = at
            _, at = _varint(file, at, stop)
            yield number, first, at
            continue
        if wire == _LENGTH:
            size, at = _varint(file, at, stop)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise _damaged(file, at)
        if at + size > stop or number == 0:
            raise _damaged(file, at)
        yield number, at, at + size
        at += size


def _varint(file: MappedFile, at: int, stop: int) -> tuple[int, int]:
    value = shift = 0
    for byte in file.bytes(at, max(0, min(10, stop - at))):
        value |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if not byte & 0x80:
            return value, at
    raise _damaged(file, at)


def _dims(file: MappedFile, first: int, last: int) -> list[int]:
    """Return one number, or several that are packed."""
    found = []
    while first < last:
        value, first = _varint(file, first, last)
        if value >= 1 << 62:
            raise _damaged(file, first)
        found.append(value)
    return found


def _name(file: MappedFile, first: int, last: int) -> str:
    if last - first > _LONGEST_NAME:
        raise _damaged(file, first)
    try:
        return file.bytes(first, last - first).decode("utf-8")
    except UnicodeDecodeError as error:
        raise _damaged(file, first) from error


def _damaged(file: MappedFile, at: int) -> CheckpointError:
    return CheckpointError(
        "no checkpoint of MindSpore, or a damaged one",
        where=str(file.path),
        found=f"something else at byte {at}",
        remedy="an encrypted checkpoint is not read",
    )


def _stored(file: MappedFile, value: _Value) -> Stored | None:
    dtype = _TYPES.get(value.kind)
    if dtype is None:
        return None
    width, there = width_of(dtype), sum(size for _, size in value.places)
    shape = value.dims
    broken = any(size % width for _, size in value.places)  # an element across two parts
    huge = (
        math.prod(size for size in shape if size) >= 1 << 60
    )  # beside a size of zero: no array has that shape
    if math.prod(shape) * width != there or broken or huge:
        raise CheckpointError(
            "a parameter that has not the bytes of its shape",
            where=f"{file.path}: {value.tag}",
            found=f"{there} bytes",
            expected=f"{math.prod(shape) * width} for {dtype}{list(shape)}",
        )

    def load() -> Bits:
        parts = [file.elements(start, size // width, width) for start, size in value.places]
        if not parts:  # of a parameter without elements
            return np.zeros(shape, f"<u{width}")
        return (parts[0] if len(parts) == 1 else np.concatenate(parts)).reshape(shape)

    return Stored(name=value.tag, shape=shape, dtype=dtype, source=file.path.name, load=load)


def _text(file: MappedFile, value: _Value) -> str:
    """Return a text: numpy's characters, four bytes each."""
    raw = b"".join(file.bytes(start, min(size, _LONGEST_NAME)) for start, size in value.places)
    return raw.decode("utf-32-le", "replace")


__all__ = ["read_mindspore"]
