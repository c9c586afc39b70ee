"""The few names of a torch checkpoint that are known: element types, storages, containers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

STORAGES: Mapping[str, str] = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
"""Element type of a storage; a storage that is in no row has none of its own."""

TYPES: Mapping[str, str] = {
    **{name: name for name in STORAGES.values()},
    **{name: name for name in ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")},
    **{"half": "float16", "float": "float32", "double": "float64", "long": "int64", "int": "int32"},
}
"""Framework-neutral names of torch's element types."""

TENSOR_BUILDERS = frozenset(
    {"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_npu_tensor"}
)
"""What makes a tensor of a storage; torch_npu's has a storage format as a further argument."""

BYTES_OF = frozenset(
    {"_codecs.encode", "builtins.bytes", "__builtin__.bytes", "builtins.bytearray", "__builtin__.bytearray"}
)


def bytes_of(arguments: tuple[Any, ...]) -> bytes:
    """Return the bytes that a pickle of protocol 2 writes as text in Latin 1."""
    first = arguments[0] if arguments else b""
    if isinstance(first, str):
        return first.encode("latin-1")
    if isinstance(first, (bytes, bytearray)):
        return bytes(first)
    raise TypeError("bytes of something else")


def _dictionary(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    pairs = next((one for one in arguments if isinstance(one, (list, tuple, dict))), ())
    return dict(pairs)


def _sequence(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arguments[0]) if arguments else ()


CONTAINERS: Mapping[str, Callable[[tuple[Any, ...]], Any]] = {
    "collections.OrderedDict": _dictionary,
    "collections.defaultdict": lambda arguments: {},
    "torch.Size": _sequence,
    **dict.fromkeys(("builtins.set", "__builtin__.set"), lambda given: set(_sequence(given))),
    **dict.fromkeys(
        ("builtins.frozenset", "__builtin__.frozenset"), lambda given: frozenset(_sequence(given))
    ),
    **dict.fromkeys(("builtins.list", "__builtin__.list"), lambda given: list(_sequence(given))),
}
"""Containers, by what makes them of the arguments that the pickle gives."""

__all__ = ["BYTES_OF", "CONTAINERS", "STORAGES", "TENSOR_BUILDERS", "TYPES", "bytes_of"]
