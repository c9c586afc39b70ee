"""What a pickle made, as plain data that can be compared and shown."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.record.elements import to_numbers
from mindspeed_precision.torch_archive.archive import TorchArchive
from mindspeed_precision.torch_archive.opcodes import Global, Made, TensorReference

_LONG = 256


def plain(value: Any, archive: TorchArchive | None = None) -> Any:
    """Return a value without classes: a namespace as a dictionary, an enumeration as its name and number.

    Bytes that are longer than 256 become their digest: they are compared, not shown.

    Args:
        value: what a pickle built.
        archive: where the elements of its tensors are.
    """
    if isinstance(value, Global):
        return value.name if value.module == "torch" else str(value)
    if isinstance(value, Made):
        return _made(value, archive)
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, str) else str(plain(key, archive)): plain(one, archive)
            for key, one in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [plain(one, archive) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(one, archive) for one in value), key=repr)
    if isinstance(value, (bytes, bytearray)):
        return _bytes(bytes(value))
    if isinstance(value, TensorReference):
        return _tensor(value, archive)
    return value


def namespace(value: Any) -> dict[str, Any]:
    """Return the attributes of ``argparse.Namespace``, or of any object that keeps its state as they do."""
    state = value.state if isinstance(value, Made) else value
    found = plain(state) if isinstance(state, Mapping) else {}
    return {str(name): one for name, one in found.items()}


def _made(value: Made, archive: TorchArchive | None) -> Any:
    if value.of.name == "Namespace" and isinstance(value.state, Mapping):
        return plain(value.state, archive)
    args = [plain(one, archive) for one in value.args]
    if value.state is None and not value.items:
        return f"{value.of.name}({', '.join(map(str, args))})"
    return {
        "class": str(value.of),
        "args": args,
        "state": plain(value.state, archive),
        "items": plain(value.items, archive),
    }


def _tensor(value: TensorReference, archive: TorchArchive | None) -> Any:
    if archive is None or not archive.dtype(value):
        return f"tensor {list(value.shape)} of {value.dtype or value.storage.kind}"
    bits = np.ascontiguousarray(archive.elements(value))
    if bits.size == 1:
        return to_numbers(HostTensor(bits=bits, dtype=archive.dtype(value))).item()
    return f"{archive.dtype(value)} {list(value.shape)}, {_bytes(bits.tobytes())}"


def _bytes(value: bytes) -> str:
    if len(value) <= _LONG:
        return value.hex()
    return f"{len(value)} bytes, blake2b {hashlib.blake2b(value, digest_size=8).hexdigest()}"


__all__ = ["namespace", "plain"]
