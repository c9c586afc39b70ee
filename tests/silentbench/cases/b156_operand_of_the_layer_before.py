"""dW is computed with the gathered input of another linear: a buffer that was used again."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import linear_backward

STALE = {}


def stale(wrapped, instance, args, kwargs):
    grads = wrapped(*args, **kwargs)
    given, weight = args[0].saved_tensors
    before, STALE[weight.shape[1]] = STALE.get(weight.shape[1]), given.detach().clone()
    if before is None or before.shape != given.shape or weight.shape != (96, 32):
        return grads
    rows = args[1].flatten(0, 1)
    return (grads[0], rows.t().matmul(before.flatten(0, 1)), *grads[2:])


CASE = case(
    "B156",
    "https://github.com/NVIDIA/TransformerEngine/issues/1616",
    "https://github.com/NVIDIA/TransformerEngine/pull/1554",
    healthy=ONE,
    patches=(linear_backward(stale, "a buffer of overlapped communication"),),
    answers=(
        by_compare(
            0,
            "wgrad",
            "decoder.layers.1.self_attention.linear_qkv*",
            "wgrad.operand_value wgrad.after_gemm wgrad.own_fault",
        ),
        by_check(
            0,
            "wgrad",
            "decoder.layers.*.self_attention.linear_qkv*",
            "wgrad.operand_not_received wgrad.not_the_product wgrad.changed_on_the_way",
        ),
    ),
)
