"""dW of fc1 is accumulated twice: the custom backward of an overlapped MoE adds it once more.

dX and every other dW are right; the loss hardly moves, since Adam and clipping hide a factor.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import linear_backward


def twice(wrapped, instance, args, kwargs):
    grads = wrapped(*args, **kwargs)
    weight = args[0].saved_tensors[1]
    is_fc1 = weight.shape[0] == 4 * weight.shape[1]
    return (grads[0], grads[1] * 2, *grads[2:]) if is_fc1 else grads


CASE = case(
    "B009",
    "https://gitcode.com/Ascend/MindSpeed commit 5cce8736 (MR !2731)",
    healthy=ONE,
    patches=(linear_backward(twice, "npu_groupmatmul_add ran twice for the first linear"),),
    answers=(
        by_compare(0, "wgrad", "decoder.layers.1.mlp.linear_fc1*", "wgrad.scaled", roles="wgrad", says="2"),
        by_check(
            0,
            "wgrad",
            "decoder.layers.*.mlp.linear_fc1*",
            "wgrad.not_the_product wgrad.changed_on_the_way wgrad.added_twice",
        ),
    ),
    quick=True,
)
