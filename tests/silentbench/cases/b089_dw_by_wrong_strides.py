"""A fused kernel of dW takes a transposed gradient for a dense one."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import linear_backward, misread


def careless(wrapped, instance, args, kwargs):
    grads = wrapped(*args, **kwargs)
    given, weight = args[0].saved_tensors
    if weight.shape != (32, 32):
        return grads
    rows, columns = args[1].flatten(0, 1), given.flatten(0, 1)
    return (grads[0], misread(rows).t().matmul(columns), *grads[2:])


CASE = case(
    "B089",
    "https://github.com/NVIDIA/Megatron-LM/commit/09c2f6e4aa",
    "https://github.com/NVIDIA/Megatron-LM/commit/e14ae44b47",
    "https://gitcode.com/Ascend/MindSpeed-Core-MS commit 56a7f0f",
    "https://gitcode.com/Ascend/MindSpeed-Core-MS commit bdc5d66",
    healthy=ONE,
    patches=(linear_backward(careless, "grad_output was not made contiguous"),),
    answers=(
        by_compare(
            0,
            "wgrad",
            "decoder.layers.1.self_attention.linear_proj*",
            "wgrad.operand_value wgrad.after_gemm wgrad.own_fault",
        ),
        by_check(
            0,
            "wgrad",
            "decoder.layers.*.self_attention.linear_proj*",
            "wgrad.operand_not_received wgrad.not_the_product wgrad.changed_on_the_way",
        ),
    ),
)
