"""The bias of a linear is not added.

It never gets a gradient. It begins at zero, so the first loss agrees.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import linear_forward


def without_bias(wrapped, instance, args, kwargs):
    ctx, given, weight, bias, *rest = args
    return wrapped(ctx, given, weight, None if weight.shape == (96, 32) else bias, *rest, **kwargs)


CASE = case(
    "B098",
    "https://gitcode.com/Ascend/MindSpeed commit ab01d5b1",
    "https://gitcode.com/Ascend/MindSpeed commit 0d469e05",
    healthy=ONE,
    patches=(linear_forward(without_bias, "the bias was dropped where a norm was fused with the linear"),),
    answers=(
        by_compare(
            0,
            "wgrad accumulate reduce dgrad",
            "decoder.layers.1.self_attention.linear_qkv*",
            "wgrad.missing dgrad.missing model.frozen_parameter",
        ),
        by_check(
            0,
            "wgrad accumulate reduce optimizer",
            "decoder.layers.*.self_attention.linear_qkv*",
            "wgrad.missing symptom.zero_gradient",
        ),
    ),
)
