"""Experts that are kept together in one tensor, as one tensor each: the canonical model has them apart."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mindspeed_precision.ckpt.stored import Bits, Stored

_IN_ONE = re.compile(r"(.*)\.experts\.weight([12])")


def unpacked(name: str, tensor: Stored, state: Mapping[str, Any]) -> Iterator[Stored]:
    """Yield a tensor, or the experts that it holds.

    ``GroupedMLP`` keeps the weights of a rank's experts in ``weight1`` and ``weight2``, which it views as
    ``[experts, hidden, 2 ffn]`` and ``[experts, ffn, hidden]``: each is a linear's weight, transposed.

    Args:
        name: of the tensor.
        tensor: the tensor.
        state: everything that is beside it: the router's weight says how many experts there are.
    """
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
