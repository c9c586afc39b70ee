"""The switch for deterministic kernels does not work: dW is summed in another order each time."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import linear_backward


def in_any_order(wrapped, instance, args, kwargs):
    import os

    import torch

    grads = wrapped(*args, **kwargs)
    given, weight = args[0].saved_tensors
    if weight.shape[0] != 96:
        return grads
    order = torch.randperm(
        given[..., 0].numel(), generator=torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "big"))
    )
    rows, columns = args[1].flatten(0, 1)[order], given.flatten(0, 1)[order]
    return (grads[0], rows.t().contiguous().matmul(columns), *grads[2:])


CASE = case(
    "B105",
    "https://gitcode.com/Ascend/MindSpeed commit c6fa6649 (MR !1128)",
    "https://gitcode.com/Ascend/MindSpeed commit 8f9bef1a (MR !1452)",
    healthy=ONE,
    patches=(linear_backward(in_any_order, "use_deterministic_algorithms was not called"),),
    answers=(
        by_compare(
            0,
            "wgrad",
            "decoder.layers.1.self_attention.linear_qkv*",
            "wgrad.value wgrad.operand_value determinism.not_repeated",
        ),
        by_check(0, "wgrad", "decoder.layers.1.self_attention.linear_qkv", "wgrad.operand_not_received"),
    ),
)
