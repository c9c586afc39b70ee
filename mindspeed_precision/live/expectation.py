"""How many records and bytes a step will be, before the first one: counted from the model and the settings.

A record's bytes and its time are measured where they can be: on the initial parameters, which every run
records before it trains. Records of a step are counted as a step goes through the model; what depends on the
loop (random states, collectives, what else it logs) is left out: the count is an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_precision.config import CaptureSettings
from mindspeed_precision.record.elements import width_of
from mindspeed_precision.records import Level, Phase, RecordKey, Role

_BOUNDARIES = (
    (Phase.FPROP, Role.INPUT),
    (Phase.FPROP, Role.OUTPUT),
    (Phase.DGRAD, Role.GRAD_OUTPUT),
    (Phase.DGRAD, Role.GRAD_INPUT),
)
_HYPERPARAMETERS = ("lr", "weight_decay", "eps", "beta1", "beta2", "step")
_MEGATRON_HYPERPARAMETERS = (*_HYPERPARAMETERS, "wd_mult", "lr_mult")
_BATCH = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What decides how much a step is.

    Attributes:
        parameters: ``(fqn, shape, dtype)`` of the trainable parameters of this rank.
        modules: names of its modules.
        microbatches: of a step; 1 where the loop does not say.
        tokens: of a microbatch on this rank; 0: not known.
        hidden: width of an activation; 0: not known.
        megatron: its linears show the operands of dW, its optimizer what it reduces and clips.
    """

    parameters: Sequence[tuple[str, tuple[int, ...], str]]
    modules: Sequence[str]
    microbatches: int = 1
    tokens: int = 0
    hidden: int = 0
    megatron: bool = True

    @classmethod
    def of(
        cls,
        parameters: Sequence[tuple[str, tuple[int, ...], str]],
        modules: Sequence[str],
        arguments: Mapping[str, Any],
    ) -> Shape:
        """Return the shape of a model that is trained with Megatron's arguments (none: another loop)."""

        def number(name: str) -> int:
            value = arguments.get(name)
            return value if type(value) is int and value > 0 else 0

        size, whole = number("micro_batch_size"), number("global_batch_size")
        lanes = number("data_parallel_size") or 1
        split = number("tensor_model_parallel_size") if arguments.get("sequence_parallel") else 1
        split *= number("context_parallel_size") or 1
        return cls(
            parameters=parameters,
            modules=modules,
            microbatches=max(1, whole // (size * lanes)) if size else 1,
            tokens=size * number("seq_length") // max(split, 1),
            hidden=number("hidden_size"),
            megatron=bool(arguments),
        )


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What a step of this rank is expected to be.

    Attributes:
        records: lines of its index.
        index_bytes: of those lines.
        payload_bytes: of elements that are kept, in the first step that is recorded.
        unsized: kinds of records whose elements are kept and whose size is not known before they are seen.
        seconds: to read and digest them; 0: not known.
    """

    records: int
    index_bytes: int
    payload_bytes: int = 0
    unsized: int = 0
    seconds: float = 0.0


def expect(
    shape: Shape,
    capture: CaptureSettings,
    *,
    step: int,
    bytes_per_record: float,
    seconds_per_record: float = 0.0,
    seconds_per_byte: float = 0.0,
) -> Expectation:
    """Count a step.

    Args:
        shape: of the model.
        capture: what is kept of each record.
        step: the first that is recorded: rules may speak of it.
        bytes_per_record: measured.
        seconds_per_record: measured on parameters.
        seconds_per_byte: likewise.
    """
    records = payload = volume = unsized = 0
    for key, size in _records(shape, capture, step):
        level = capture.level_of(key)
        if level is None:
            continue
        records += 1
        volume += size or 0
        if level is Level.TENSOR:
            payload += size or 0
            unsized += size is None
    return Expectation(
        records=records,
        index_bytes=round(records * bytes_per_record),
        payload_bytes=payload,
        unsized=unsized,
        # each is the time of all parameters, spread over what they are: the greater is the bound
        seconds=max(records * seconds_per_record, volume * seconds_per_byte),
    )


def _records(shape: Shape, capture: CaptureSettings, step: int) -> Iterator[tuple[RecordKey, int | None]]:
    """Yield the records of a step with the bytes of their elements; None: not known before they are seen."""
    for microbatch in range(shape.microbatches):
        yield from _microbatch(shape, capture, step, microbatch)
    if not capture.optimizer:
        return
    numbers = _MEGATRON_HYPERPARAMETERS if shape.megatron else _HYPERPARAMETERS
    for fqn, dims, dtype in shape.parameters:
        size = math.prod(dims)

        def key(phase: Phase, role: Role, slot: str = "", fqn: str = fqn) -> RecordKey:
            return RecordKey(step=step, phase=phase, fqn=fqn, role=role, slot=slot)

        if shape.megatron:
            yield key(Phase.REDUCE, Role.REDUCED_GRAD), size * _FLOAT32
            yield key(Phase.CLIP, Role.MAIN_GRAD, "clipped"), size * _FLOAT32
        yield key(Phase.OPTIMIZER, Role.EXP_AVG), size * _FLOAT32
        yield key(Phase.OPTIMIZER, Role.EXP_AVG_SQ), size * _FLOAT32
        yield key(Phase.OPTIMIZER, Role.PARAM), size * width_of(dtype)
        if width_of(dtype) < _FLOAT32:
            yield key(Phase.OPTIMIZER, Role.MASTER_PARAM), size * _FLOAT32
        yield from ((key(Phase.OPTIMIZER, Role.HYPERPARAMETER, name), 8) for name in numbers)


def _microbatch(
    shape: Shape, capture: CaptureSettings, step: int, microbatch: int
) -> Iterator[tuple[RecordKey, int | None]]:
    def key(phase: Phase, role: Role, fqn: str, slot: str = "") -> RecordKey:
        return RecordKey(step=step, microbatch=microbatch, phase=phase, fqn=fqn, role=role, slot=slot)

    width = width_of(shape.parameters[0][2]) if shape.parameters else _FLOAT32
    activation = shape.tokens * shape.hidden * width or None
    if capture.batch:
        yield from (
            (key(Phase.BATCH, Role.BATCH, "batch", slot), shape.tokens * 8 or None) for slot in _BATCH
        )
        yield key(Phase.LOSS, Role.LOSS, "loss"), 4
    if capture.modules:
        for fqn in shape.modules:
            yield from ((key(phase, role, fqn, "0"), activation) for phase, role in _BOUNDARIES)
    if not capture.wgrad:
        return
    for fqn, dims, dtype in shape.parameters:
        size, width = math.prod(dims), width_of(dtype)
        yield key(Phase.WGRAD, Role.WGRAD, fqn), size * width
        if len(dims) == 2 and shape.megatron:
            module = fqn.rpartition(".")[0]
            yield key(Phase.WGRAD, Role.WGRAD, module), size * width
            yield key(Phase.WGRAD, Role.GRAD_OUTPUT, module), shape.tokens * dims[0] * width or None
            yield key(Phase.WGRAD, Role.INPUT, module), shape.tokens * dims[1] * width or None
        if shape.megatron:
            yield key(Phase.ACCUMULATE, Role.MAIN_GRAD, fqn, "before"), size * _FLOAT32
        yield key(Phase.ACCUMULATE, Role.MAIN_GRAD, fqn, "after"), size * _FLOAT32


__all__ = ["Expectation", "Shape", "expect"]
