"""Operations of a dump (L1 and mix): which linear's dW one computes, and what one does not read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_precision.msprobe.names import EntryName
from mindspeed_precision.msprobe.tensors import DumpedTensor

_PRODUCTS = ("matmul", "mm", "__matmul__")
_SCALED_SUMS = ("baddbmm", "addbmm", "addmm", "addmv", "addr", "baddbmm_", "addmm_")


def computes_wgrad(
    name: EntryName,
    operands: Sequence[DumpedTensor],
    made: Sequence[DumpedTensor],
    weight: DumpedTensor | None,
) -> bool:
    """Tell whether an operation in the backward of a linear is the product that gives dW.

    That is ``[out, tokens] @ [tokens, in]`` of the weight's shape, where the weight is no operand.

    Args:
        name: of the operation.
        operands: its arguments.
        made: its results.
        weight: of the linear; None: it has none.
    """
    if name.path.rpartition(".")[2] not in _PRODUCTS or len(operands) != 2 or len(made) != 1:
        return False
    left, right = operands
    fits = len(left.shape) == len(right.shape) == 2 and left.shape[1] == right.shape[0]
    if not fits or weight is None or made[0].shape != weight.shape:
        return False
    return right.likeness != weight.likeness


def first_unread(name: EntryName, entry: Mapping[str, Any]) -> bool:
    """Tell whether an operation does not read its first argument: what is there is left over memory."""
    given = entry.get("input_kwargs")
    beta = given.get("beta") if isinstance(given, dict) else None
    scaled = name.path.rpartition(".")[2] in _SCALED_SUMS
    return scaled and isinstance(beta, dict) and beta.get("value") in (0, 0.0)
