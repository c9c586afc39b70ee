"""One tensor out of a file of ``torch.save``, without torch and without unpickling anything.

The file is a zip archive: ``*/data.pkl`` says how the tensor lies in its storage, ``*/data/KEY`` is the
storage. The pickle's opcodes are read and never run: what stands for a function stays a name, and anything
but the rebuilding of one tensor is refused.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.errors import DumpError
from mindspeed_precision.record.elements import width_of

_LARGEST_PICKLE = 1 << 20
"""Bytes of the description of one tensor: some hundred."""

_PARAMETER = "torch._utils _rebuild_parameter"
_TENSOR = "torch._utils _rebuild_tensor_v2"
_TYPED_TENSOR = "torch._utils _rebuild_tensor_v3"
"""Of types that have no storage class (float8): bytes, and the type as a seventh argument."""

_WIDTHS = {
    "BoolStorage": 1,
    "ByteStorage": 1,
    "CharStorage": 1,
    "ShortStorage": 2,
    "HalfStorage": 2,
    "BFloat16Storage": 2,
    "IntStorage": 4,
    "FloatStorage": 4,
    "LongStorage": 8,
    "DoubleStorage": 8,
    "ComplexFloatStorage": 8,
    "ComplexDoubleStorage": 16,
    "UntypedStorage": 1,
}
"""Bytes of an element, by the name of its storage's class."""


@dataclass(frozen=True)
class _Name:
    """A global that a pickle names: not looked up."""

    text: str


@dataclass(frozen=True)
class _Call:
    """A call that a pickle asks for: not made."""

    function: Any
    arguments: tuple[Any, ...]


_MARK = object()


def read_torch_file(path: Path) -> NDArray[Any]:
    """Return the elements of the tensor in a file, as unsigned integers of their width.

    Args:
        path: a file that holds one tensor.

    Returns:
        ``[...]`` of its shape, in C order; complex elements as bytes in a last dimension.

    Raises:
        DumpError: it is no such file, or its parts do not fit each other.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(archive, str(path))
    except (OSError, zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        text = " ".join(str(error).split())[:120]
        raise DumpError(f"not a file of torch.save: {text}", where=str(path)) from error


def _read(archive: zipfile.ZipFile, where: str) -> NDArray[Any]:
    names = {name.partition("/")[2]: name for name in archive.namelist()}
    if "data.pkl" not in names:
        raise DumpError("not a file of torch.save", where=where, expected="an archive with data.pkl")
    if "byteorder" in names and _entry(archive, names["byteorder"], where, 16) != b"little":
        raise DumpError("not little-endian", where=where, expected="little")
    storage, offset, shape, stride, width = _tensor(
        _entry(archive, names["data.pkl"], where, _LARGEST_PICKLE), where
    )
    key, size = _storage(storage, where)
    width = width or size[0]
    count = size[0] * size[1] // width
    stored = f"data/{key}"
    if stored not in names:
        raise DumpError("the storage of the tensor is not in its file", where=where, expected=stored)
    data = _entry(archive, names[stored], where, count * width)
    if len(data) != count * width:
        found, expected = f"{len(data)} bytes", f"{count * width}"
        raise DumpError("a storage of another size", where=where, found=found, expected=expected)
    return _strided(data, width, offset, shape, stride, where)


def _entry(archive: zipfile.ZipFile, name: str, where: str, limit: int) -> bytes:
    """Return a stored entry; nothing is unpacked, so that nothing can grow."""
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > limit:
        found = f"{name} of {info.file_size} bytes"
        raise DumpError("not as torch.save writes it", where=where, found=found, expected=f"at most {limit}")
    return archive.read(info)


def _storage(storage: Any, where: str) -> tuple[str, tuple[int, int]]:
    """Return key, and bytes of an element and number of elements, of a storage."""
    if isinstance(storage, tuple) and len(storage) == 5 and storage[0] == "storage":
        _, kind, key, _, count = storage
        name = kind.text.rpartition(" ")[2] if isinstance(kind, _Name) else ""
        if name in _WIDTHS and isinstance(key, str) and type(count) is int and 0 <= count < 1 << 48:
            return key, (_WIDTHS[name], count)
    raise DumpError("a storage of an unknown kind", where=where, found=str(storage)[:120])


def _tensor(data: bytes, where: str) -> tuple[Any, int, tuple[int, ...], tuple[int, ...], int]:
    """Return storage, offset, shape, stride and bytes of an element (0: as the storage says)."""
    try:
        made = _described(data)
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise DumpError(f"not the pickle of one tensor: {error}", where=where) from error
    if _calls(made) == _PARAMETER and made.arguments:
        made = made.arguments[0]
    if _calls(made) in (_TENSOR, _TYPED_TENSOR) and len(made.arguments) >= 6:
        storage, offset, shape, stride = made.arguments[:4]
        numbers = (offset, *shape, *stride) if isinstance(shape, tuple) and isinstance(stride, tuple) else ()
        width = width_of(str(made.arguments[6])) if _calls(made) == _TYPED_TENSOR else 0
        if numbers and len(shape) == len(stride) and all(type(n) is int and n >= 0 for n in numbers):
            return storage, offset, shape, stride, width
    raise DumpError("not the pickle of one tensor", where=where, found=str(made)[:120])


def _calls(made: Any) -> str:
    """Return the name of what a value asks to be called; empty for a plain value."""
    called = (
        isinstance(made, _Call) and isinstance(made.function, _Name) and isinstance(made.arguments, tuple)
    )
    return str(made.function.text) if called else ""


def _described(data: bytes) -> Any:
    """Follow a pickle's opcodes with values that are numbers, texts, tuples and names alone."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in ("PROTO", "FRAME"):
            continue
        if name == "STOP":
            return stack.pop()
        if name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if argument is None else int(argument)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[int(str(argument))])
        else:
            _push(stack, name, argument)
    raise ValueError("it has no end")


def _push(stack: list[Any], name: str, argument: Any) -> None:
    if name == "MARK":
        stack.append(_MARK)
    elif name == "GLOBAL":
        stack.append(_Name(str(argument)))
    elif name in ("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"):
        stack.append(argument)
    elif name in ("NEWTRUE", "NEWFALSE", "NONE"):
        stack.append({"NEWTRUE": True, "NEWFALSE": False, "NONE": None}[name])
    elif name in ("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
        stack.append(_tuple(stack, name))
    elif name == "BINPERSID":
        pass  # a reference to a storage: the tuple that names it stays
    elif name == "REDUCE":
        arguments = stack.pop()
        stack.append(_Call(stack.pop(), arguments))
    else:
        raise ValueError(f"opcode {name}")


def _tuple(stack: list[Any], name: str) -> tuple[Any, ...]:
    if name == "TUPLE":
        start = len(stack) - 1 - stack[::-1].index(_MARK)
        made = tuple(stack[start + 1 :])
        del stack[start:]
        return made
    count = 0 if name == "EMPTY_TUPLE" else int(name[-1])
    made = tuple(stack[len(stack) - count :])
    del stack[len(stack) - count :]
    return made


def _strided(
    data: bytes, width: int, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], where: str
) -> NDArray[Any]:
    """Return the elements in C order; a view that reaches beyond the storage is refused."""
    count, elements = len(data) // width, math.prod(shape)
    if not elements:
        return np.zeros((*shape, 2) if width == 16 else shape, f"<u{min(width, 8)}")
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if last >= count or elements > count:
        found, expected = f"shape {list(shape)}, stride {list(stride)}", f"a view of {count} elements"
        raise DumpError("a tensor beyond its storage", where=where, found=found, expected=expected)
    if width == 16:  # complex128: as pairs of 8 bytes
        whole = np.frombuffer(data, "<u8").reshape(-1, 2)
        taken = np.lib.stride_tricks.as_strided(
            whole[offset:], (*shape, 2), (*(16 * step for step in stride), 8), writeable=False
        )
    else:
        flat = np.frombuffer(data, f"<u{width}")
        taken = np.lib.stride_tricks.as_strided(
            flat[offset:], shape, tuple(width * step for step in stride), writeable=False
        )
    return np.ascontiguousarray(taken).reshape(taken.shape)
