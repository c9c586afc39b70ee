"""Safetensors: one file, a directory of Hugging Face, or one of MindSpore; and ``pytorch_model.bin``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mindspeed_precision.ckpt.megatron_torch import named
from mindspeed_precision.ckpt.mindspore_names import sorted_out
from mindspeed_precision.ckpt.plain import plain
from mindspeed_precision.ckpt.stored import Checkpoint, Stored, geometry_of
from mindspeed_precision.counting import count
from mindspeed_precision.dump.payload import PayloadFile
from mindspeed_precision.dump.strict_json import load_object
from mindspeed_precision.errors import CheckpointError, DumpError
from mindspeed_precision.record.elements import width_of
from mindspeed_precision.torch_archive.archive import TorchArchive
from mindspeed_precision.torch_archive.mapped import MappedFile, require_inside
from mindspeed_precision.torch_archive.opcodes import TensorReference, kind_of

_TYPES = {
    **{
        "BOOL": "bool",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F16": "float16",
        "BF16": "bfloat16",
    },
    **{"F32": "float32", "F64": "float64"},
    **{
        f"{letter}{bits}": f"{name}int{bits}"
        for letter, name in (("I", ""), ("U", "u"))
        for bits in (8, 16, 32, 64)
    },
}
_INDEXES = ("*.safetensors.index.json", "param_name_map.json", "*.bin.index.json")
_LARGEST_INDEX = 1 << 28


def read_safetensors(path: Path, given: str) -> Checkpoint:
    """Read one file of safetensors.

    Raises:
        CheckpointError: it is damaged.
    """
    tensors = {one.name: one for one in _of_file(path)}
    return _checkpoint(given, "safetensors", tensors, _config(path.parent), [])


def read_directory(directory: Path, given: str) -> Checkpoint:
    """Read a directory of safetensors, or of ``pytorch_model.bin``, with or without an index.

    Raises:
        CheckpointError: a file is damaged, missing, or elsewhere; the index names what is not there.
    """
    unread: list[str] = []
    index = _index(directory)
    suffixes = ("*.safetensors",) if any(directory.glob("*.safetensors")) else ("*.bin",)
    named_files = set(index.values())
    present = {path.name for suffix in suffixes for path in directory.glob(suffix)}
    files = sorted(named_files or present)
    unread += [f"{name}: not in the index" for name in sorted(present - named_files) if named_files]
    tensors: dict[str, Stored] = {}
    for name in files:
        path = require_inside(directory, directory / name)
        for tensor in _of_file(path) if path.suffix == ".safetensors" else _of_torch(path, unread):
            if index and index.get(tensor.name) != name:
                unread.append(f"{tensor.name} in {name}: the index has it elsewhere or not at all")
                continue
            if tensor.name in tensors:
                raise CheckpointError("a tensor in two files", where=str(directory), found=tensor.name)
            tensors[tensor.name] = tensor
    missing = sorted(index.keys() - tensors.keys())
    if missing:
        raise CheckpointError(
            "the index names tensors that no file holds", where=str(directory), found=", ".join(missing[:3])
        )
    form = f"{suffixes[0].removeprefix('*.')}, {count(len(files), 'file')}"
    return _checkpoint(given, form, tensors, _config(directory), unread)


def _checkpoint(
    given: str, form: str, tensors: Mapping[str, Stored], config: Mapping[str, Any], unread: list[str]
) -> Checkpoint:
    mindspore = config.get("framework") == "mindspore"
    found = sorted_out(tensors, mindspore=mindspore)
    family = (
        "huggingface"
        if any(name.startswith(("model.layers.", "transformer.")) for name in tensors)
        else "torch"
    )
    if found.states or mindspore:
        family = "mindspore"
    return Checkpoint(
        path=given,
        form=f"Hugging Face, {form}" if config else form,
        family=family,
        tensors=found.tensors,
        states=found.states,
        config=config,
        rest=found.numbers,
        geometry=geometry_of(config),
        unread=tuple(unread),
    )


def _index(directory: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in (path for pattern in _INDEXES for path in sorted(directory.glob(pattern))):
        plain_index = _json(require_inside(directory, path))
        table = plain_index.get("weight_map", plain_index)
        if not isinstance(table, Mapping) or not all(isinstance(name, str) for name in table.values()):
            raise CheckpointError("no index of tensors", where=str(path), expected="weight_map: {name: file}")
        found.update(table)
        break
    return found


def _json(path: Path) -> dict[str, Any]:
    file = MappedFile(path)
    if file.size > _LARGEST_INDEX:
        raise CheckpointError("too large for an index", where=str(path), found=f"{file.size} bytes")
    try:
        return load_object(file.bytes(0, file.size), where=str(path))
    except DumpError as error:
        raise CheckpointError(error.what, where=error.where, found=error.found) from error


def _config(directory: Path) -> dict[str, Any]:
    """Return ``config.json``; what it says of a text model in a model of several kinds comes first."""
    path = directory / "config.json"
    if not path.is_file():
        return {}
    found = _json(require_inside(directory, path))
    text = found.pop("text_config", None)
    return {**found, **text} if isinstance(text, dict) else found


def _of_file(path: Path) -> Iterator[Stored]:
    try:
        places = PayloadFile(path).places
    except DumpError as error:
        raise CheckpointError(
            error.what, where=error.where, found=error.found, expected=error.expected, remedy=error.remedy
        ) from error
    file = MappedFile(path)
    for name, (tag, shape, start) in places.items():
        yield _stored(file, name, _TYPES[tag], shape, start)


def _stored(file: MappedFile, name: str, dtype: str, shape: tuple[int, ...], start: int) -> Stored:
    count = 1
    for size in shape:
        count *= size
    width = width_of(dtype)
    return Stored(
        name=name,
        shape=shape,
        dtype=dtype,
        source=file.path.name,
        load=lambda: file.elements(start, count, width).reshape(shape),
    )


def _of_torch(path: Path, unread: list[str]) -> Iterator[Stored]:
    archive = TorchArchive(MappedFile(path))
    root = archive.root
    if not isinstance(root, Mapping):
        raise CheckpointError("no state dict", where=str(path), found=kind_of(root))
    for name, value in root.items():
        if isinstance(value, TensorReference):
            for _, tensor in named(archive, str(name), value, path.name, unread):
                yield tensor


def read_torch_file(path: Path, given: str) -> Checkpoint:
    """Read one file of ``torch.save``: a state dict, or a dictionary that has one beside other things.

    Raises:
        CheckpointError: it is damaged, or holds no tensors by name.
    """
    archive = TorchArchive(MappedFile(path))
    root = archive.root
    unread: list[str] = []
    if not isinstance(root, Mapping):
        raise CheckpointError("no state dict", where=str(path), found=kind_of(root))
    inner = next(
        (root[name] for name in ("state_dict", "model", "module") if isinstance(root.get(name), Mapping)),
        root,
    )
    tensors = {
        str(name): tensor
        for name, value in inner.items()
        if isinstance(value, TensorReference)
        for _, tensor in named(archive, str(name), value, path.name, unread)
    }
    if not tensors:
        raise CheckpointError(
            "no tensors by name", where=str(path), found=", ".join(map(str, list(root)[:6]))
        )
    rest = {
        str(k): plain(v, archive)
        for k, v in root.items()
        if v is not inner and not isinstance(v, TensorReference)
    }
    return Checkpoint(
        path=given,
        form="torch.save",
        family="torch",
        tensors=tensors,
        rest=rest,
        config=_config(path.parent),
        geometry=geometry_of(_config(path.parent)),
        unread=tuple(unread),
    )


__all__ = ["read_directory", "read_safetensors", "read_torch_file"]
