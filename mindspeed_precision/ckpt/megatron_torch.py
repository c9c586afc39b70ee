"""Megatron's checkpoint format ``torch``: a file for each tensor-, pipeline- and expert-parallel rank."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindspeed_precision.ckpt.experts import unpacked
from mindspeed_precision.ckpt.megatron_optimizer import group_numbers, states_of_rank
from mindspeed_precision.ckpt.plain import namespace, plain
from mindspeed_precision.ckpt.stored import Checkpoint, Copies, Stored, geometry_of
from mindspeed_precision.ckpt.tensor_parallel import over_ranks, unequal
from mindspeed_precision.counting import count
from mindspeed_precision.errors import CheckpointError
from mindspeed_precision.torch_archive.archive import TorchArchive
from mindspeed_precision.torch_archive.mapped import MappedFile, require_inside
from mindspeed_precision.torch_archive.opcodes import TensorReference, kind_of

_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")
_CHUNK = re.compile(r"model(\d*)")
_LAYER = re.compile(r"(decoder\.layers|encoder\.layers)\.(\d+)\.(.*)")
_EXPERT = re.compile(r"(.*\.experts\.local_experts)\.(\d+)\.(.*)")
_GROUPED = re.compile(r"(.*\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)")
FILE, OPTIMIZER_FILE = "model_optim_rng.pt", "distrib_optim.pt"


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """One file, and where its rank sits."""

    tp: int
    pp: int
    ep: int
    archive: TorchArchive
    root: Mapping[str, Any]
    label: str
    directory: Path

    def chunks(self) -> list[Mapping[str, Any]]:
        """Return the state dicts of the model chunks, in order."""
        found = {
            int(match.group(1) or 0): value
            for name, value in self.root.items()
            if (match := _CHUNK.fullmatch(str(name))) and isinstance(value, Mapping)
        }
        return [found[number] for number in sorted(found)]


def read_megatron_torch(directory: Path, given: str) -> Checkpoint:
    """Read ``iter_XXXXXXX`` of the format ``torch``, all ranks put together.

    Raises:
        CheckpointError: a file is damaged, missing, or of another model than the others.
    """
    ranks = _ranks(directory)
    args = namespace(ranks[0].root.get("args"))
    offsets, notes = _first_layers(ranks, args)
    unread: list[str] = []
    copies: list[Copies] = []
    roles: dict[str, dict[str, list[tuple[_Rank, Stored]]]] = defaultdict(lambda: defaultdict(list))
    loose: dict[str, Stored] = {}
    for rank in ranks:
        for number, chunk in enumerate(rank.chunks()):
            for name, tensor in _tensors(rank, chunk, unread):
                for one in unpacked(name, tensor, chunk):
                    roles["param"][_global(one.name, rank, offsets[rank.pp, number], chunk)].append(
                        (rank, one)
                    )
        states = states_of_rank(
            rank.archive, rank.root, rank.chunks(), rank.directory / OPTIMIZER_FILE, rank.label
        )
        for role, chunk_number, own, tensor in states.placed:
            name = _global(own, rank, offsets[rank.pp, chunk_number], rank.chunks()[chunk_number])
            roles[role][name].append((rank, tensor))
        loose |= states.loose
        unread += states.unread
    expert_tp = args.get("expert_tensor_parallel_size")
    whole = {
        role: dict(_joined(found, args, expert_tp, directory.name, copies, unread))
        for role, found in roles.items()
    }
    rest = {str(k): plain(v, ranks[0].archive) for k, v in ranks[0].root.items() if not _is_state(str(k))}
    rest |= group_numbers(ranks[0].root.get("optimizer"), ranks[0].archive)
    return Checkpoint(
        path=given,
        form=f"Megatron torch, {count(len(ranks), 'file')}{_layout(ranks)}",
        family="megatron",
        tensors=whole.pop("param", {}),
        states=whole,
        loose=loose,
        config=args,
        rest=rest,
        geometry=geometry_of(args),
        copies=tuple(copies),
        ranks=len(ranks),
        unread=tuple(dict.fromkeys(unread)),
        notes=tuple(notes),
    )


def _is_state(name: str) -> bool:
    return name in ("args", "optimizer") or _CHUNK.fullmatch(name) is not None


def _ranks(directory: Path) -> list[_Rank]:
    found = []
    for path in sorted(directory.glob("mp_rank_*")):
        match = _RANK.fullmatch(path.name)
        if match is None:
            continue
        require_inside(directory, path)
        file = require_inside(directory, path / FILE)
        if not file.is_file():
            raise CheckpointError("a rank without its file", where=str(path), expected=FILE)
        archive = TorchArchive(MappedFile(file))
        root = archive.root
        if not isinstance(root, Mapping):
            raise CheckpointError("no checkpoint of Megatron", where=str(file), found=kind_of(root))
        numbers = [int(number) for number in match.groups() if number is not None]
        found.append((numbers, archive, root, path))
    if not found:
        raise CheckpointError("no ranks in this checkpoint", where=str(directory), expected="mp_rank_00")
    args = namespace(found[0][2].get("args"))
    ranks = [
        _Rank(**_coordinates(numbers, args), archive=archive, root=root, label=path.name, directory=path)
        for numbers, archive, root, path in found
    ]
    _require_all(ranks, args, directory)
    return ranks


def _coordinates(numbers: Sequence[int], args: Mapping[str, Any]) -> dict[str, int]:
    """Read ``mp_rank_TT``, ``_PPP`` and ``_EEE``: a second number alone is of the group that is split."""
    if len(numbers) == 3:
        return dict(zip(("tp", "pp", "ep"), numbers, strict=True))
    second = numbers[1] if len(numbers) == 2 else 0
    stages = args.get("pipeline_model_parallel_size")
    of_experts = isinstance(stages, int) and stages == 1
    return {"tp": numbers[0], "pp": 0 if of_experts else second, "ep": second if of_experts else 0}


def _require_all(ranks: Sequence[_Rank], args: Mapping[str, Any], directory: Path) -> None:
    asked = {
        "tp": args.get("tensor_model_parallel_size"),
        "pp": args.get("pipeline_model_parallel_size"),
        "ep": args.get("expert_model_parallel_size"),
    }
    for axis, size in asked.items():
        numbers = {getattr(rank, axis) for rank in ranks}
        expected = size if isinstance(size, int) and size > 0 else max(numbers) + 1
        if numbers != set(range(expected)):
            raise CheckpointError(
                f"files of {axis} ranks are missing, or there are more than the checkpoint's arguments say",
                where=str(directory),
                found=", ".join(map(str, sorted(numbers))),
                expected=f"0 to {expected - 1}",
            )


def _layout(ranks: Sequence[_Rank]) -> str:
    sizes = {axis: len({getattr(rank, axis) for rank in ranks}) for axis in ("tp", "pp", "ep")}
    told = [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
    chunks = len(ranks[0].chunks())
    return f" ({' '.join([*told, *([f'vpp{chunks}'] if chunks > 1 else [])])})" if told or chunks > 1 else ""


def _first_layers(
    ranks: Sequence[_Rank], args: Mapping[str, Any]
) -> tuple[dict[tuple[int, int], int], list[str]]:
    """Return the global number of the first layer of each stage's chunks: chunk by chunk, stage by stage."""
    counts: dict[tuple[int, int], int] = {}
    for rank in ranks:
        for number, chunk in enumerate(rank.chunks()):
            layers = [int(m.group(2)) for name in chunk if (m := _LAYER.fullmatch(str(name)))]
            counts[number, rank.pp] = max(counts.get((number, rank.pp), 0), max(layers, default=-1) + 1)
    total, notes = args.get("num_layers"), []
    if isinstance(total, int) and sum(counts.values()) != total:
        even, rest = divmod(total, len(counts))
        if rest == 0 and all(count <= even for count in counts.values()):
            counts = dict.fromkeys(counts, even)  # a layer without parameters keeps its number
        else:
            notes.append(f"{sum(counts.values())} layers were found, the arguments say {total}")
    first, offsets = 0, {}
    for number, stage in sorted(counts):
        offsets[stage, number] = first
        first += counts[number, stage]
    return offsets, notes


def _tensors(rank: _Rank, chunk: Mapping[str, Any], unread: list[str]) -> Iterator[tuple[str, Stored]]:
    for name, value in chunk.items():
        if isinstance(value, TensorReference):
            yield from named(rank.archive, str(name), value, rank.label, unread)
        elif value is not None and not str(name).endswith("_extra_state"):
            unread.append(f"{name}: no tensor")


def named(
    archive: TorchArchive, name: str, value: TensorReference, source: str, unread: list[str]
) -> Iterator[tuple[str, Stored]]:
    """Yield a tensor of an archive, or say that its element type is not known."""
    dtype = archive.dtype(value)
    if not dtype:
        unread.append(f"{name}: element type {value.dtype or value.storage.kind}")
        return
    yield (
        name,
        Stored(
            name=name, shape=value.shape, dtype=dtype, source=source, load=lambda: archive.elements(value)
        ),
    )


def _global(name: str, rank: _Rank, first_layer: int, chunk: Mapping[str, Any]) -> str:
    """Return the canonical name: layers and experts numbered over the whole model."""
    layer = _LAYER.fullmatch(name)
    if layer:
        name = f"{layer.group(1)}.{int(layer.group(2)) + first_layer}.{layer.group(3)}"
    expert, grouped = _EXPERT.fullmatch(name), _GROUPED.fullmatch(name)
    if (expert or grouped) and rank.ep:
        local = _local_experts(chunk)
        if expert:
            return f"{expert.group(1)}.{int(expert.group(2)) + rank.ep * local}.{expert.group(3)}"
        assert grouped is not None
        number = int(grouped.group(4)) + rank.ep * local
        return f"{grouped.group(1)}.{grouped.group(2)}.{grouped.group(3)}{number}"
    return name


def _local_experts(chunk: Mapping[str, Any]) -> int:
    numbers = [int(m.group(2)) for name in chunk if (m := _EXPERT.fullmatch(str(name)))]
    numbers += [int(m.group(4)) for name in chunk if (m := _GROUPED.fullmatch(str(name)))]
    return max(numbers, default=-1) + 1


def _joined(
    found: Mapping[str, Sequence[tuple[_Rank, Stored]]],
    args: Mapping[str, Any],
    expert_tp: Any,
    source: str,
    copies: list[Copies],
    unread: list[str],
) -> Iterator[tuple[str, Stored]]:
    gated = bool(args.get("swiglu") or args.get("gated_linear_unit"))
    for name, held in found.items():
        by_rank: dict[int, list[Stored]] = defaultdict(list)
        whole = ".experts." in name and expert_tp == 1
        for rank, tensor in held:
            by_rank[0 if whole else rank.tp].append(replace(tensor, source=rank.label))
        for same in by_rank.values():
            differing = unequal(name, same) if len(same) > 1 else None
            copies += [differing] if differing else []
        shards = [by_rank[number][0] for number in sorted(by_rank)]
        try:
            tensor, differing = over_ranks(name, shards, gated=gated, source=source)
        except CheckpointError as error:
            unread.append(f"{name}: {error.what}" + (f" ({error.found})" if error.found else ""))
            continue
        copies += [differing] if differing else []
        yield name, replace(tensor, name=name)


__all__ = ["named", "read_megatron_torch"]
