"""Checkpoints of torch.distributed: Megatron's format ``torch_dist``, and any that torch's own writer left.

``.metadata`` says of each tensor its global shape and its chunks, and where each chunk is in the files
``__R_N.distcp``: an archive of ``torch.save`` in a range of bytes. Megatron adds ``common.pt`` for what is no
tensor, stacks the layers along a first dimension, and the experts along the next one.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mindspeed_precision.ckpt.megatron_optimizer import group_numbers
from mindspeed_precision.ckpt.plain import namespace, plain
from mindspeed_precision.ckpt.stored import Bits, Checkpoint, Stored, geometry_of, joined
from mindspeed_precision.errors import CheckpointError
from mindspeed_precision.records import Placement, Split
from mindspeed_precision.torch_archive.archive import TorchArchive
from mindspeed_precision.torch_archive.mapped import MappedFile, require_inside
from mindspeed_precision.torch_archive.names import TYPES
from mindspeed_precision.torch_archive.opcodes import Global, Made, TensorReference, kind_of, read_pickle

_COMMON_STATE = "common_state/"
METADATA, COMMON = ".metadata", "common.pt"
_STATE = re.compile(r"optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param|param|master_param|step)\.(.+)")
_STACKED = re.compile(r"(.*\blayers)\.(?!\d+\.)(.+)")
_EXPERTS = re.compile(r"(.*\.experts)\.experts\.(.+)")
_ROLES = {"fp32_param": "master_param", "param": "master_param"}
_LARGEST_METADATA = 1 << 31


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Place:
    file: str
    start: int
    length: int


def read_torch_dist(directory: Path, given: str) -> Checkpoint:
    """Read a directory with ``.metadata``.

    Raises:
        CheckpointError: the metadata or a file is damaged, missing, or does not fit the other.
    """
    reader = _Reader(directory)
    sharded = dict(reader.tensors())
    states: dict[str, dict[str, Stored]] = defaultdict(dict)
    tensors: dict[str, Stored] = {}
    loose: dict[str, Stored] = {}
    for name, tensor in sharded.items():
        state = _STATE.fullmatch(name)
        if state is None and name.startswith(("optimizer.", "chained_")):
            loose[name] = tensor
            continue
        own = state.group(2) if state else name
        target = states[_ROLES.get(state.group(1), state.group(1))] if state else tensors
        target.update((one.name, one) for one in _unstacked(own, tensor))
    common = reader.common()
    args = namespace(common.get("args"))
    rest = {
        str(k): plain(v, reader.archive) for k, v in common.items() if str(k) not in ("args", "optimizer")
    }
    rest |= reader.objects()
    return Checkpoint(
        path=given,
        form=f"Megatron torch_dist, data files: {len(reader.files)}" if common else "torch.distributed",
        family="megatron" if common else "torch",
        tensors=tensors,
        states=states,
        loose=loose,
        config=args,
        rest=rest | group_numbers(common.get("optimizer"), reader.archive),
        geometry=geometry_of(args),
        unread=tuple(reader.unread),
    )


class _Reader:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        path = require_inside(directory, directory / METADATA)
        file = MappedFile(path)
        if file.size > _LARGEST_METADATA:
            raise CheckpointError("too large for metadata", where=str(path), found=f"{file.size} bytes")
        root = read_pickle(file.bytes(0, file.size), where=str(path))
        state = getattr(root, "state", None)
        if not isinstance(root, Made) or root.of.name != "Metadata" or not isinstance(state, Mapping):
            raise CheckpointError("no metadata of torch.distributed.checkpoint", where=str(path))
        self._described: Mapping[str, Any] = _mapping(state.get("state_dict_metadata"), path)
        self._places = _places(_mapping(state.get("storage_data"), path), path)
        self._flat = state.get("mcore_data") if isinstance(state.get("mcore_data"), Mapping) else {}
        self.files = sorted({place.file for place in self._places.values()})
        self.unread: list[str] = []
        self.archive: TorchArchive | None = None
        self._open = cache(self._opened)

    def common(self) -> Mapping[str, Any]:
        """Return what Megatron saved beside tensors: in a file of its own, from 0.19 as an object."""
        path = self._directory / COMMON
        if path.is_file():
            self.archive = TorchArchive(MappedFile(require_inside(self._directory, path)))
        else:
            found = next((name for name in self._described if str(name).startswith(_COMMON_STATE)), None)
            place = self._places.get((str(found), ()))
            if place is None:
                return {}
            self.archive = TorchArchive(self._open(place.file), place.start, place.length)
        root = self.archive.root
        while isinstance(root, list) and len(root) == 1:
            root = root[0]
        return root if isinstance(root, Mapping) else {}

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        for name, described in self._described.items():
            if not isinstance(described, Made) or described.of.name != "TensorStorageMetadata":
                continue
            dtype, shape, chunks = _described(described)
            if not dtype:
                self.unread.append(f"{name}: an element type that is not known here")
                continue
            pieces = [(self._piece(str(name), chunk, dtype), chunk) for chunk in chunks]
            yield str(name), self._whole(str(name), shape, pieces)

    def _whole(self, name: str, shape: tuple[int, ...], pieces: Sequence[tuple[Stored, _Chunk]]) -> Stored:
        original = self._flat.get(name) if isinstance(self._flat, Mapping) else None
        placed = [(piece, _placement(chunk, shape, name)) for piece, chunk in pieces]
        found = joined(placed, shape, name=name, source=self._directory.name)
        wanted = _original_shape(original)
        if wanted and wanted != shape and math.prod(wanted) == math.prod(shape):
            return found.changed(lambda bits: bits.reshape(wanted), wanted)
        return found

    def _piece(self, name: str, chunk: _Chunk, dtype: str) -> Stored:
        place = self._places.get((name, chunk.offsets))
        if place is None:
            raise CheckpointError(
                "a chunk that no file holds",
                where=f"{self._directory}: {name}",
                found=f"offset {list(chunk.offsets)}",
            )
        return Stored(
            name=name,
            shape=chunk.sizes,
            dtype=dtype,
            source=place.file,
            load=lambda: self._elements(place, chunk, dtype),
        )

    def _elements(self, place: _Place, chunk: _Chunk, dtype: str) -> Bits:
        archive = TorchArchive(self._open(place.file), place.start, place.length)
        tensor = archive.root
        fits = isinstance(tensor, TensorReference) and math.prod(tensor.shape) == math.prod(chunk.sizes)
        if not fits or archive.dtype(tensor) != dtype:
            raise CheckpointError(
                "a chunk that is not what the metadata says",
                where=archive.where,
                expected=f"{dtype}{list(chunk.sizes)}",
            )
        return archive.elements(tensor).reshape(chunk.sizes)

    def objects(self) -> dict[str, Any]:
        """Return what was saved as bytes: random states; not Transformer Engine's state."""
        found: dict[str, Any] = {}
        for name, described in self._described.items():
            place = self._places.get((str(name), ()))
            if (
                not isinstance(described, Made)
                or described.of.name != "BytesStorageMetadata"
                or place is None
            ):
                continue
            if "_extra_state" not in str(name) and not str(name).startswith(_COMMON_STATE):
                archive = TorchArchive(self._open(place.file), place.start, place.length)
                found[str(name)] = plain(archive.root, archive)
        return found

    def _opened(self, name: str) -> MappedFile:
        path = self._directory / name
        require_inside(self._directory, path)
        return MappedFile(path)


def _mapping(value: Any, path: Path) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError("metadata without its tables", where=str(path), found=kind_of(value))
    return value


def _places(storage: Mapping[Any, Any], path: Path) -> dict[tuple[str, tuple[int, ...]], _Place]:
    found = {}
    for index, info in storage.items():
        key, value = _state(index), _state(info)
        file, start, length = (value.get(name) for name in ("relative_path", "offset", "length"))
        if value.get("transform_descriptors"):
            raise CheckpointError("compressed chunks are not read", where=str(path), found=str(file))
        if (
            not isinstance(file, str)
            or type(start) is not int
            or type(length) is not int
            or min(start, length) < 0
        ):
            raise CheckpointError("ill-formed metadata", where=str(path), found="a chunk without a place")
        offset = key.get("offset")
        found[str(key.get("fqn")), _integers(offset) if offset else ()] = _Place(
            file=file, start=start, length=length
        )
    return found


def _state(value: Any) -> Mapping[str, Any]:
    state = value.state if isinstance(value, Made) else None
    if isinstance(state, Mapping):
        return state
    raise CheckpointError("ill-formed metadata", found=kind_of(value))


def _integers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, (list, tuple)) or any(type(one) is not int or one < 0 for one in values):
        raise CheckpointError("ill-formed metadata", found="sizes that are no numbers")
    return tuple(values)


def _described(described: Made) -> tuple[str, tuple[int, ...], list[_Chunk]]:
    state = _state(described)
    properties = state.get("properties")
    inner = properties.state if isinstance(properties, Made) else None
    first = (
        inner[0]
        if isinstance(inner, tuple) and inner
        else inner.get("dtype")
        if isinstance(inner, Mapping)
        else None
    )
    dtype = TYPES.get(first.name, "") if isinstance(first, Global) else ""
    listed = state.get("chunks")
    if not isinstance(listed, list):
        raise CheckpointError("ill-formed metadata", found="a tensor without chunks")
    chunks: dict[tuple[int, ...], _Chunk] = {}
    for one in listed:
        inner = _state(one)
        chunk = _Chunk(offsets=_integers(inner.get("offsets")), sizes=_integers(inner.get("sizes")))
        chunks.setdefault(chunk.offsets, chunk)
    return dtype, _integers(state.get("size")), list(chunks.values())


def _placement(chunk: _Chunk, shape: tuple[int, ...], name: str) -> Placement:
    sizes = list(zip(chunk.offsets, chunk.sizes, shape, strict=False))
    if not len(chunk.offsets) == len(chunk.sizes) == len(shape) or any(
        o + s > whole for o, s, whole in sizes
    ):
        raise CheckpointError(
            "a chunk outside of its tensor",
            where=name,
            found=f"{chunk.offsets} {chunk.sizes}",
            expected=str(shape),
        )
    splits = tuple(
        Split(dim=dim, blocks=((offset, size),))
        for dim, (offset, size, whole) in enumerate(sizes)
        if size != whole
    )
    return Placement(shape=shape, splits=splits)


def _original_shape(value: Any) -> tuple[int, ...]:
    state = value.state if isinstance(value, Made) else value
    found = state.get("nd_reformulated_orig_global_shape") if isinstance(state, Mapping) else None
    return _integers(found) if isinstance(found, (list, tuple)) else ()


def _unstacked(name: str, tensor: Stored) -> Iterator[Stored]:
    """Yield the layers and experts of a tensor that has several along its first dimensions."""
    layers = _STACKED.fullmatch(name)
    if layers and tensor.shape:
        for number in range(tensor.shape[0]):
            yield from _unstacked(f"{layers.group(1)}.{number}.{layers.group(2)}", _slice(tensor, number))
        return
    experts = _EXPERTS.fullmatch(name)
    if experts and tensor.shape:
        for number in range(tensor.shape[0]):
            own = f"{experts.group(1)}.local_experts.{number}.{experts.group(2)}"
            yield _slice(tensor, number).changed(lambda bits: bits, tensor.shape[1:], name=own)
        return
    yield tensor.changed(lambda bits: bits, tensor.shape, name=name)


def _slice(tensor: Stored, number: int) -> Stored:
    return tensor.changed(lambda bits: bits[number], tensor.shape[1:])


__all__ = ["METADATA", "read_torch_dist"]
