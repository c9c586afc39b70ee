"""The records of one pipeline stage of a synthetic transformer: what is seen, and in which order.

For ``testing.scale_runs``. Of each record: its name, its shape on one rank, and which tensor it shows. Two
records of one tensor have the same bits, as the output of a module and the input of the next one have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from math import prod

from mindspeed_precision.dump.encode import digest_text, form_text, key_text, origin_text
from mindspeed_precision.record.statistics import digest_number
from mindspeed_precision.records import (
    NO_MICROBATCH,
    Layout,
    ParameterDeclaration,
    Phase,
    Placement,
    RecordKey,
    Role,
    Split,
)

_SEQUENCE = 128
_NUMBERS = {"lr": 1e-4, "weight_decay": 0.1, "eps": 1e-8, "beta1": 0.9, "beta2": 0.95}


class Reach(IntEnum):
    """Which records a fault in a forward pass reaches."""

    NEVER = 0
    """What enters: data, numbers of the optimizer, zeros."""
    FORWARD = 1
    """What comes behind it in its microbatch and data-parallel rank."""
    BACKWARD = 2
    """All of its microbatch and data-parallel rank."""
    SUM = 3
    """From its microbatch on, in its data-parallel rank."""
    STEP = 4
    """Every rank."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A record of one step of one stage.

    Attributes:
        key: without its step.
        shape: on the rank.
        value: name of the tensor that it shows.
        reach: how a fault gets there.
        microbatch: whose tensor it is: of a sum before an addition, the microbatch before.
        of_data: each data-parallel rank has its own.
        sharded: each tensor-parallel rank has its own.
        order: place in the forward pass of the whole model.
        number: of a number of the host; None: its bits say it.
        scalar: it is a loss or a norm.
        part: the elements of the parameter that it has; None: all.
    """

    key: RecordKey
    shape: tuple[int, ...]
    value: str
    reach: Reach
    microbatch: int
    of_data: bool = True
    sharded: bool = False
    order: int = 0
    number: float | None = None
    scalar: bool = False
    part: tuple[int, int] | None = None

    def text(self, seq: int, step: int) -> tuple[str, str]:
        """Return its line before and after the digest, of a step; a number's digest is in the first part."""
        plain = self.scalar or self.number is not None
        form = form_text(
            self.shape, "float64" if plain else "bfloat16", None if plain else _dense(self.shape)
        )
        before = f'{{"kind":"record","seq":{seq},"step":{step},{key_text(self.key)},{form},'
        after = f',"payload":null,{origin_text("", self.part)},"placement":null}}\n'
        if self.number is None:
            return before, after
        number = float(step) if self.key.slot == "step" else self.number
        return before + digest_text(digest_number(number)) + after, ""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One pipeline stage.

    Attributes:
        parameters: canonical name to canonical shape and the dimension that tensor parallelism splits.
        init: what is recorded before the first step.
        step: what is recorded in each.
        ranges: by parameter, the elements that one data-parallel rank updates; None: every rank does all.
    """

    parameters: dict[str, tuple[tuple[int, ...], int | None]]
    init: tuple[Seen, ...]
    step: tuple[Seen, ...]
    ranges: dict[str, tuple[int, int]] | None = None

    def declared(self, tp_rank: int, tp_size: int) -> tuple[ParameterDeclaration, ...]:
        """Return the parameters that a rank declares."""
        found = []
        for name, (shape, dim) in self.parameters.items():
            placement = Placement(shape=shape)
            if dim is not None and tp_size > 1:
                size = shape[dim] // tp_size
                split = Split(dim=dim, blocks=((tp_rank * size, size),))
                placement = Placement(shape=shape, splits=(split,))
            found.append(
                ParameterDeclaration(
                    fqn=name,
                    shape=placement.local_shape,
                    dtype="bfloat16",
                    trainable=True,
                    placement=placement,
                )
            )
        return tuple(found)


def stage_of(*, first: int, layers: int, last: bool, hidden: int, tp: int, microbatches: int) -> Stage:
    """Return a stage.

    Args:
        first: global number of its first layer.
        layers: how many it has.
        last: it computes the loss.
        hidden: width of the model.
        tp: tensor-parallel size.
        microbatches: of each step.
    """
    parameters: dict[str, tuple[tuple[int, ...], int | None]] = {}
    for layer in range(first, first + layers):
        for name, _, _, weight, dim in _modules(hidden):
            if weight:
                parameters[f"decoder.layers.{layer}.{name}.weight"] = (weight, dim)
    local = {name: _local(shape, dim, tp) for name, (shape, dim) in parameters.items()}
    init = tuple(
        Seen(
            key=RecordKey(step=0, phase=Phase.INIT, fqn=name, role=Role.PARAM),
            shape=shape,
            value=f"param {name}",
            reach=Reach.NEVER,
            microbatch=NO_MICROBATCH,
            of_data=False,
            sharded=parameters[name][1] is not None,
        )
        for name, shape in local.items()
    )
    records: list[Seen] = []
    numbers = range(first, first + layers)
    for microbatch in range(microbatches):
        one = _Microbatch(microbatch, hidden, tp, local, parameters)
        records += one.batch()
        records += [seen for layer in numbers for seen in one.forward(layer)]
        records += one.loss() if last else []
        records += [seen for layer in reversed(numbers) for seen in one.backward(layer)]
    records += _whole_step(local, parameters, last=last)
    return Stage(parameters=parameters, init=init, step=tuple(records))


_OF_RANGES = (Phase.REDUCE, Phase.CLIP, Phase.OPTIMIZER)


def ranged(stage: Stage, size: int, rank: int) -> Stage:
    """Return a stage as one data-parallel rank has it under a distributed optimizer.

    As in Megatron all its parameters lie in one buffer, the last first, of which each rank has a share.
    """
    sizes = {seen.key.fqn: prod(seen.shape) for seen in stage.init}
    share = -(-sum(sizes.values()) // size)
    ranges, begin = {}, 0
    for name, numel in reversed(sizes.items()):
        first, last = max(rank * share - begin, 0), min((rank + 1) * share - begin, numel)
        if first < last:
            ranges[name] = first, last
        begin += numel
    found = [_ranged(seen, ranges, sizes) for seen in stage.step]
    return replace(stage, step=tuple(seen for seen in found if seen is not None), ranges=ranges)


def _ranged(seen: Seen, ranges: dict[str, tuple[int, int]], sizes: dict[str, int]) -> Seen | None:
    """Return a record as a rank with ranges has it; None: it has none."""
    key = seen.key
    if key.fqn not in sizes or key.phase not in _OF_RANGES or key.role is Role.PARAM:
        return seen
    if key.fqn not in ranges:
        return None
    first, last = ranges[key.fqn]
    if key.role is Role.HYPERPARAMETER:
        return seen
    slot = f"{first}:{last}" if key.phase is Phase.REDUCE else key.slot
    part = None if last - first == sizes[key.fqn] else (first, last)
    value = f"{seen.value} {first}:{last}"
    return replace(seen, key=replace(key, slot=slot), shape=(last - first,), value=value, part=part)


def _modules(hidden: int) -> list[tuple[str, str, str, tuple[int, ...], int | None]]:
    """Return the modules of a layer in forward order: name, what it receives, what it gives, weight, dim."""
    return [
        ("input_layernorm", "h", "n", (hidden,), None),
        ("self_attention.linear_qkv", "n", "qkv", (3 * hidden, hidden), 0),
        ("self_attention.core_attention", "qkv", "core", (), None),
        ("self_attention.linear_proj", "core", "proj", (hidden, hidden), 1),
        ("pre_mlp_layernorm", "r", "m", (hidden,), None),
        ("mlp.linear_fc1", "m", "fc1", (4 * hidden, hidden), 0),
        ("mlp.linear_fc2", "act", "fc2", (hidden, 4 * hidden), 1),
    ]


_WIDTHS = {"qkv": 3, "core": 1, "fc1": 4, "act": 4}
"""Tensors that tensor parallelism splits, with their width over that of the model."""


def _local(shape: tuple[int, ...], dim: int | None, tp: int) -> tuple[int, ...]:
    return tuple(size // tp if number == dim else size for number, size in enumerate(shape))


def _dense(shape: tuple[int, ...]) -> Layout:
    steps = [1]
    for size in reversed(shape[1:]):
        steps.insert(0, steps[0] * size)
    return Layout(stride=tuple(steps[: len(shape)]))


class _Microbatch:
    """What one microbatch shows."""

    def __init__(
        self,
        number: int,
        hidden: int,
        tp: int,
        local: dict[str, tuple[int, ...]],
        parameters: dict[str, tuple[tuple[int, ...], int | None]],
    ) -> None:
        self._number, self._hidden, self._tp = number, hidden, tp
        self._local, self._parameters = local, parameters

    def _seen(
        self, phase: Phase, fqn: str, role: Role, slot: str, value: str, shape: tuple[int, ...]
    ) -> Seen:
        key = RecordKey(step=0, microbatch=self._number, phase=phase, fqn=fqn, role=role, slot=slot)
        forward = phase is Phase.FPROP
        return Seen(
            key=key,
            shape=shape,
            value=value,
            reach=Reach.FORWARD if forward else Reach.BACKWARD,
            microbatch=self._number,
        )

    def batch(self) -> Iterator[Seen]:
        """Return the data that enters."""
        for slot in ("tokens", "labels"):
            seen = self._seen(Phase.BATCH, "batch", Role.BATCH, slot, slot, (1, _SEQUENCE))
            yield replace(seen, reach=Reach.NEVER)

    def loss(self) -> Iterator[Seen]:
        """Return the loss."""
        yield replace(self._seen(Phase.LOSS, "loss", Role.LOSS, "", "loss", ()), scalar=True)

    def _tensor(
        self, phase: Phase, fqn: str, role: Role, name: str, layer: int, *, back: bool = False
    ) -> Seen:
        """Return the record of an activation, or of its gradient."""
        width = _WIDTHS.get(name)
        shape = (_SEQUENCE, 1, (width or 1) * self._hidden // (self._tp if width else 1))
        value = f"{'gradient of ' if back else ''}{name} {layer}"
        slot = "" if phase is Phase.WGRAD else "0"
        seen = self._seen(phase, fqn, role, slot, value, shape)
        return replace(seen, sharded=width is not None, order=_order(name, layer))

    def forward(self, layer: int) -> Iterator[Seen]:
        """Return what a layer's modules receive and give."""
        for fqn, role, name, number in _boundaries(layer):
            yield self._tensor(Phase.FPROP, fqn, role, name, number)

    def backward(self, layer: int) -> Iterator[Seen]:
        """Return the gradients of the same, dW where a module has a weight, and its sum."""
        flow = {Role.INPUT: Role.GRAD_INPUT, Role.OUTPUT: Role.GRAD_OUTPUT}
        for fqn, role, name, number in reversed(list(_boundaries(layer))):
            yield self._tensor(Phase.DGRAD, fqn, flow[role], name, number, back=True)
            if role is Role.INPUT and f"{fqn}.weight" in self._local:
                yield from self._wgrad(fqn, layer)

    def _wgrad(self, fqn: str, layer: int) -> Iterator[Seen]:
        parameter, value = f"{fqn}.weight", f"dW {fqn}"
        _, received, given, _, dim = next(m for m in _modules(self._hidden) if fqn.endswith(m[0]))
        shape = self._local[parameter]
        sharded = dim is not None

        def gradient(phase: Phase, name: str, role: Role, slot: str = "") -> Seen:
            return replace(self._seen(phase, name, role, slot, value, shape), sharded=sharded)

        if len(shape) > 1:
            yield self._tensor(Phase.WGRAD, fqn, Role.GRAD_OUTPUT, given, layer, back=True)
            seen = self._tensor(Phase.WGRAD, fqn, Role.INPUT, received, layer)
            yield replace(seen, reach=Reach.FORWARD)
            yield gradient(Phase.WGRAD, fqn, Role.WGRAD)
        yield gradient(Phase.WGRAD, parameter, Role.WGRAD)
        for slot, microbatch in (("before", self._number - 1), ("after", self._number)):
            seen = gradient(Phase.ACCUMULATE, parameter, Role.MAIN_GRAD, slot)
            total = f"zeros {parameter}" if microbatch < 0 else f"main_grad {parameter}"
            reach = Reach.NEVER if microbatch < 0 else Reach.SUM
            yield replace(seen, value=total, reach=reach, microbatch=microbatch)


def _boundaries(layer: int) -> Iterator[tuple[str, Role, str, int]]:
    """Return what a layer's modules receive and give in forward order: name, role, tensor, its layer."""
    outer = f"decoder.layers.{layer}"
    yield outer, Role.INPUT, "h", layer
    for name, received, given, _, _ in _modules(1):
        if name == "self_attention.linear_qkv":
            yield f"{outer}.self_attention", Role.INPUT, "n", layer
        if name == "mlp.linear_fc1":
            yield f"{outer}.mlp", Role.INPUT, "m", layer
        yield f"{outer}.{name}", Role.INPUT, received, layer
        yield f"{outer}.{name}", Role.OUTPUT, given, layer
        if name == "self_attention.linear_proj":
            yield f"{outer}.self_attention", Role.OUTPUT, "proj", layer
        if name == "mlp.linear_fc2":
            yield f"{outer}.mlp", Role.OUTPUT, "fc2", layer
    yield outer, Role.OUTPUT, "h", layer + 1


_PLACES = ("h", "n", "qkv", "core", "proj", "r", "m", "fc1", "act", "fc2")


def _order(name: str, layer: int) -> int:
    return layer * len(_PLACES) + _PLACES.index(name)


def order_of_fault(layer: int) -> int:
    """Return the place of the output of ``mlp.linear_fc1`` in the forward pass."""
    return _order("fc1", layer)


def _whole_step(
    local: dict[str, tuple[int, ...]],
    parameters: dict[str, tuple[tuple[int, ...], int | None]],
    *,
    last: bool,
) -> list[Seen]:
    """Return what belongs to no microbatch: reduction, norm, clipping, optimizer, loss."""

    def seen(phase: Phase, fqn: str, role: Role, value: str, slot: str = "") -> Seen:
        return Seen(
            key=RecordKey(step=0, phase=phase, fqn=fqn, role=role, slot=slot),
            shape=local.get(fqn, ()),
            value=value,
            reach=Reach.STEP,
            microbatch=NO_MICROBATCH,
            of_data=False,
            sharded=fqn in parameters and parameters[fqn][1] is not None,
        )

    found = [seen(Phase.REDUCE, name, Role.REDUCED_GRAD, f"reduced {name}") for name in local]
    found.append(replace(seen(Phase.CLIP, "grad_norm", Role.GRAD_NORM, "grad_norm"), scalar=True))
    found += [seen(Phase.CLIP, name, Role.MAIN_GRAD, f"clipped {name}", "clipped") for name in local]
    for name in local:
        for slot, number in {**_NUMBERS, "step": 0.0}.items():
            one = seen(Phase.OPTIMIZER, name, Role.HYPERPARAMETER, slot, slot)
            found.append(replace(one, shape=(), number=number, reach=Reach.NEVER, sharded=False))
        for role in (Role.EXP_AVG, Role.EXP_AVG_SQ, Role.PARAM):
            found.append(seen(Phase.OPTIMIZER, name, role, f"{role.value} {name}"))
    if last:
        found.append(replace(seen(Phase.LOSS, "loss", Role.LOSS, "mean loss", "lm loss"), scalar=True))
    return found
