"""The loss is summed over context-parallel ranks without a mean.

All gradients are twice what they should be.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import DP, FOUR
from silentbench.plants import trainer_built


def scaled(wrapped, instance, args, kwargs):
    wrapped(*args, **kwargs)
    scale = instance.config.grad_scale_func
    instance.config.grad_scale_func = lambda loss: scale(loss) * 2


CASE = case(
    "B113",
    "https://gitcode.com/Ascend/MindSpeed-LLM commit 9ea595ac",
    healthy=DP,
    reference=FOUR,
    patches=(trainer_built(scaled, "a sum without the mean"),),
    answers=(
        by_compare(0, "dgrad", "(model) output_layer", "loss.gradient_scaled", says="2"),
        by_check(0, "dgrad", "(model) output_layer", "loss.gradient_scaled"),
    ),
)
