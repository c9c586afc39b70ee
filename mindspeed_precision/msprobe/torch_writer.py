"""One tensor into a file that ``torch.load`` reads with ``weights_only=True``, without torch."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.errors import DumpError

_STORAGES = {
    "bool": "BoolStorage",
    "uint8": "ByteStorage",
    "int8": "CharStorage",
    "int16": "ShortStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int32": "IntStorage",
    "float32": "FloatStorage",
    "int64": "LongStorage",
    "float64": "DoubleStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}


def write_torch_file(path: Path, host: HostTensor, shape: Sequence[int]) -> None:
    """Write a contiguous tensor.

    Args:
        path: the file; replaced if it exists.
        host: its elements.
        shape: its logical shape.

    Raises:
        DumpError: the element type has no storage class in torch.
        OSError: the disk is full or not writable.
    """
    kind = _STORAGES.get(host.dtype)
    if kind is None:
        expected = ", ".join(_STORAGES)
        raise DumpError("no storage class in torch", where=str(path), found=host.dtype, expected=expected)
    data = np.ascontiguousarray(host.bits).tobytes()
    count = int(np.prod(shape, dtype=np.int64)) if shape else 1
    entries = {
        "data.pkl": _pickle(kind, count, shape),
        "byteorder": b"little",
        "data/0": data,
        "version": b"3\n",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in entries.items():
            archive.writestr(f"archive/{name}", content)


def _pickle(kind: str, count: int, shape: Sequence[int]) -> bytes:
    """Return the pickle of ``torch._utils._rebuild_tensor_v2`` with its arguments, protocol 2."""
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.insert(0, step)
        step *= max(size, 1)
    storage = b"(" + _text("storage") + _name("torch", kind) + _text("0") + _text("cpu") + _integer(count)
    arguments = storage + b"tQ" + _integer(0) + _tuple(shape) + _tuple(stride)
    arguments += b"\x89" + _name("collections", "OrderedDict") + b")R"  # no gradient wanted, no hooks
    return b"\x80\x02" + _name("torch._utils", "_rebuild_tensor_v2") + b"(" + arguments + b"tR."


def _name(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _integer(value: int) -> bytes:
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x08" + struct.pack("<q", value)


def _tuple(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_integer, values)) + b"t"
