"""What Megatron's optimizers keep, in the format ``torch``: numbered tensors, told to belong to parameters.

A file numbers the optimizer's tensors and does not name them. The numbers follow the groups, and each group
has its parameters in the order of the model (``megatron.core.optimizer`` ``_get_param_groups``): those
without weight decay are biases and one-dimensional parameters, those of experts and those with a learning
rate of their own have groups of theirs. That is tried, and holds only if count and every shape agree; else
the tensors keep their numbers, and are compared under those.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_precision.ckpt.distributed_optimizer import ModelParameter, divided
from mindspeed_precision.ckpt.plain import namespace, plain
from mindspeed_precision.ckpt.stored import Stored
from mindspeed_precision.torch_archive.archive import TorchArchive
from mindspeed_precision.torch_archive.mapped import MappedFile, require_inside
from mindspeed_precision.torch_archive.opcodes import TensorReference

_NO_PARAMETER = re.compile(r".*(?:_extra_state|inv_freq|expert_bias|tokens_per_expert\w*|router\.\w*bias)")
_MASTERS = ("fp32_from_fp16_params", "fp32_from_float16_params")
MOMENTS = ("exp_avg", "exp_avg_sq")
STEP, COMMON_STEP, MASTER = "step", "common_step", "master_param"


@dataclass(kw_only=True)
class OptimizerStates:
    """What one rank's optimizer keeps.

    Attributes:
        placed: ``(role, chunk, the parameter's own name, tensor)``.
        loose: by a name of their own, tensors whose parameter is not known.
        unread: what was not read, and why.
    """

    placed: list[tuple[str, int, str, Stored]] = field(default_factory=list)
    loose: dict[str, Stored] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)


def states_of_rank(
    archive: TorchArchive,
    root: Mapping[str, Any],
    chunks: Sequence[Mapping[str, Any]],
    sharded: Path,
    label: str,
) -> OptimizerStates:
    """Return what a rank's file says of its optimizer.

    Args:
        archive: the file.
        root: what it holds.
        chunks: the state dicts of its model chunks.
        sharded: where a distributed optimizer would have left its tensors.
        label: the rank, for messages.
    """
    found = OptimizerStates()
    optimizer = root.get("optimizer")
    several = _optimizers(optimizer)
    parameters = list(_parameters(archive, chunks))
    every = [group for one in several for group in _groups(one)]
    for number, one in enumerate(several):
        if isinstance(one, Mapping):
            prefix = f"optimizer[{number}]" if len(several) > 1 else "optimizer"
            _of_one(archive, one, every, parameters, prefix, found, label)
    if sharded.is_file():
        buffers = TorchArchive(MappedFile(require_inside(sharded.parent, sharded)))
        args = namespace(root.get("args"))
        known = [one for one in parameters if one.dtype]
        placed, unread = divided(buffers, archive, known, args, label)
        found.placed += placed
        found.unread += unread
    return found


def _optimizers(value: Any) -> list[Any]:
    """Return the optimizers of a chain, by number or in a list; or the one that there is."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, Mapping) and value and all(isinstance(key, int) for key in value):
        return [value[key] for key in sorted(value)]
    return [value]


def _inner(optimizer: Any) -> Mapping[str, Any]:
    """Return torch's optimizer inside of Megatron's."""
    nested = optimizer.get("optimizer") if isinstance(optimizer, Mapping) else None
    found = nested if isinstance(nested, Mapping) else optimizer
    return found if isinstance(found, Mapping) else {}


def _groups(optimizer: Any) -> list[Mapping[str, Any]]:
    listed = _inner(optimizer).get("param_groups")
    return [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, (list, tuple)) else []


def _parameters(archive: TorchArchive, chunks: Sequence[Mapping[str, Any]]) -> Iterator[ModelParameter]:
    for number, chunk in enumerate(chunks):
        for name, value in chunk.items():
            if isinstance(value, TensorReference) and not _NO_PARAMETER.fullmatch(str(name)):
                yield ModelParameter(
                    chunk=number, name=str(name), reference=value, dtype=archive.dtype(value)
                )


def _of_one(
    archive: TorchArchive,
    optimizer: Mapping[str, Any],
    every: Sequence[Mapping[str, Any]],
    parameters: Sequence[ModelParameter],
    prefix: str,
    found: OptimizerStates,
    label: str,
) -> None:
    state = _inner(optimizer).get("state")
    states: Mapping[Any, Any] = state if isinstance(state, Mapping) else {}
    masters = next((optimizer[name] for name in _MASTERS if name in optimizer), ())
    for number, group in enumerate(_groups(optimizer)):
        indices = [one for one in group.get("params") or () if isinstance(one, int)]
        kept = [states[index] if isinstance(states.get(index), Mapping) else {} for index in indices]
        members = _members(group, every, parameters, len(indices))
        shapes = [_shape(one) for one in kept]
        fits = len(members) == len(indices) and all(
            shape in (None, member.reference.shape) for shape, member in zip(shapes, members, strict=False)
        )
        of_master = _master_members(masters, number, members if fits else [], len(indices))
        for place, values in enumerate(kept):
            own = f"{prefix}.param_groups[{number}][{place}]"
            member = members[place] if fits else None
            _keep(archive, values, member, own, found, label)
        for place, value in enumerate(of_master):
            member = members[place] if fits and len(of_master) == len(members) else None
            own = f"{prefix}.param_groups[{number}][{place}]"
            _keep(archive, {MASTER: value}, member, own, found, label)


def _members(
    group: Mapping[str, Any],
    every: Sequence[Mapping[str, Any]],
    parameters: Sequence[ModelParameter],
    count: int,
) -> list[ModelParameter]:
    """Return the parameters that a group should have, in order."""
    flags = {name: any(one.get(name) for one in every) for name in ("is_expert_parallel", "is_decoupled_lr")}

    def belongs(one: ModelParameter) -> bool:
        undecayed = one.name.endswith(".bias") or len(one.reference.shape) == 1
        of_expert = flags["is_expert_parallel"] and ".experts." in one.name
        own_rate = (
            flags["is_decoupled_lr"] and re.search("word_embeddings|output_layer", one.name) is not None
        )
        decays = group.get("wd_mult", 1) != 0
        return (
            undecayed is not decays
            and of_expert == bool(group.get("is_expert_parallel"))
            and own_rate == bool(group.get("is_decoupled_lr"))
        )

    found = [one for one in parameters if belongs(one)]
    return found if len(found) == count else list(parameters) if len(parameters) == count else found


def _shape(values: Mapping[str, Any]) -> tuple[int, ...] | None:
    moment = values.get(MOMENTS[0])
    return moment.shape if isinstance(moment, TensorReference) else None


def _master_members(masters: Any, number: int, members: Sequence[ModelParameter], count: int) -> list[Any]:
    of_group = masters[number] if isinstance(masters, (list, tuple)) and number < len(masters) else ()
    values = [one for one in of_group or () if isinstance(one, TensorReference)]
    shapes_fit = all(v.shape == m.reference.shape for v, m in zip(values, members, strict=False))
    return values if len(values) == count and shapes_fit else []


def _keep(
    archive: TorchArchive,
    values: Mapping[str, Any],
    member: ModelParameter | None,
    own: str,
    found: OptimizerStates,
    label: str,
) -> None:
    for role, value in values.items():
        if not isinstance(value, TensorReference) or role == STEP:
            continue
        dtype = archive.dtype(value)
        if not dtype:
            found.unread.append(f"{label}: {own}.{role}: element type {value.dtype or value.storage.kind}")
            continue
        tensor = Stored(
            name=member.name if member else f"{own}.{role}",
            shape=value.shape,
            dtype=dtype,
            source=label,
            load=lambda value=value: archive.elements(value),  # type: ignore[misc]
        )
        if member is not None and value.shape == member.reference.shape:
            found.placed.append((str(role), member.chunk, member.name, tensor))
        else:
            found.loose[f"{label}/{own}.{role}"] = tensor


def group_numbers(optimizer: Any, archive: TorchArchive | None) -> dict[str, Any]:
    """Return what an optimizer keeps besides tensors: groups' numbers, loss scale, count of steps."""
    found: dict[str, Any] = {}
    steps: set[Any] = set()
    several = _optimizers(optimizer)
    for number, one in enumerate(several):
        if not isinstance(one, Mapping):
            continue
        prefix = f"optimizer[{number}]" if len(several) > 1 else "optimizer"
        state = _inner(one).get("state")
        kept = list(state.values()) if isinstance(state, Mapping) else []
        if isinstance(state, Mapping) and COMMON_STEP in state:
            steps.add(plain(state[COMMON_STEP], archive))
        steps |= {
            plain(values[STEP], archive) for values in kept if isinstance(values, Mapping) and STEP in values
        }
        for place, group in enumerate(_groups(one)):
            told = {str(k): plain(v, archive) for k, v in group.items() if k != "params"}
            steps |= {told.pop(STEP)} if isinstance(told.get(STEP), (int, float)) else set()
            found[f"{prefix}.param_groups[{place}]"] = told
        if one.get("grad_scaler") is not None:
            found[f"{prefix}.grad_scaler"] = plain(one["grad_scaler"], archive)
    if steps:
        found["optimizer.step"] = sorted(steps, key=repr)
    return found


__all__ = ["MASTER", "MOMENTS", "STEP", "OptimizerStates", "group_numbers", "states_of_rank"]
