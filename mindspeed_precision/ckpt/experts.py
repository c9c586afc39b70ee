"""Experts that are kept together in one tensor, as one tensor each: the canonical model has them apart."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mindspeed_precision.ckpt.stored import Bits, Stored

_IN_ONE = re.compile(r"(.*)\.experts\.weight([12])")
_STACKED = re.compile(r"(.*\.(?:mlp|feed_forward))\.experts\.(gate_up_proj|down_proj)(_bias)?")
_LINEARS = {"gate_up_proj": "linear_fc1", "down_proj": "linear_fc2"}


def unpacked(name: str, tensor: Stored, state: Mapping[str, Any]) -> Iterator[Stored]:
    """Yield a tensor, or the experts that it holds.

    ``GroupedMLP`` keeps the weights of a rank's experts in ``weight1`` and ``weight2``, which it views as
    ``[experts, hidden, 2 ffn]`` and ``[experts, ffn, hidden]``: each is a linear's weight, transposed.

    Args:
        name: of the tensor.
        tensor: the tensor.
        state: everything that is beside it: the router's weight says how many experts there are.
    """
    if _STACKED.fullmatch(name):
        yield from _unstacked(name, tensor, state)
        return
    match = _IN_ONE.fullmatch(name)
    router = state.get(f"{match.group(1)}.router.weight") if match else None
    experts, hidden = _matrix(router)
    if match is None or not experts or tensor.numel % (experts * hidden):
        yield tensor
        return
    other = tensor.numel // (experts * hidden)
    shape = (experts, hidden, other) if match.group(2) == "1" else (experts, other, hidden)
    for expert in range(experts):
        yield tensor.changed(
            lambda bits, expert=expert: _one_of(bits, shape, expert),  # type: ignore[misc]
            (shape[2], shape[1]),
            name=f"{match.group(1)}.experts.local_experts.{expert}.linear_fc{match.group(2)}.weight",
        )


def _unstacked(name: str, tensor: Stored, state: Mapping[str, Any]) -> Iterator[Stored]:
    """Yield the experts that Hugging Face keeps along the first dimension (gpt-oss, Llama 4, Qwen3 VL).

    Most of these classes compute ``x @ W`` and keep ``[experts, in, out]``: then each is a linear's weight,
    transposed. gpt-oss, the one whose experts have biases, has gate and up in turns (``[..., ::2]``).
    """
    match = _STACKED.fullmatch(name)
    assert match is not None
    block, linear, bias = match.groups()
    experts, hidden = next(
        (found for one in ("router", "gate") if (found := _matrix(state.get(f"{block}.{one}.weight")))[0]),
        (0, 0),
    )
    if not experts or tensor.load is None or tensor.shape[:1] != (experts,):
        yield tensor
        return
    fused = state.get(f"{block}.experts.gate_up_proj")
    transposed = not bias and tuple(getattr(fused, "shape", ()))[1:2] == (hidden,)
    in_turns = linear == "gate_up_proj" and f"{block}.experts.gate_up_proj_bias" in state

    def one_of(bits: Bits, expert: int) -> Bits:
        own = bits[expert].T if transposed else bits[expert]
        return np.concatenate([own[::2], own[1::2]]) if in_turns else own

    shape = tensor.shape[1:][::-1] if transposed else tensor.shape[1:]
    for expert in range(experts):
        yield tensor.changed(
            lambda bits, expert=expert: one_of(bits, expert),  # type: ignore[misc]
            shape,
            name=f"{block}.experts.local_experts.{expert}.{_LINEARS[linear]}.{'bias' if bias else 'weight'}",
        )


def _matrix(value: Any) -> tuple[int, int]:
    shape = tuple(getattr(value, "shape", ()))
    if len(shape) != 2:
        return 0, 0
    rows, columns = shape
    return int(rows), int(columns)


def _one_of(bits: Bits, shape: tuple[int, ...], expert: int) -> Bits:
    found: Bits = bits.reshape(shape)[expert].T
    return found


__all__ = ["unpacked"]
