"""The loss of data-parallel ranks lacks a factor: all gradients are half of what they should be."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import DP, FOUR
from silentbench.plants import trainer_built


def scaled(wrapped, instance, args, kwargs):
    wrapped(*args, **kwargs)
    scale = instance.config.grad_scale_func
    instance.config.grad_scale_func = lambda loss: scale(loss) * 0.5


CASE = case(
    "B063",
    "https://github.com/NVIDIA/Megatron-LM/commit/5946e24b37",
    healthy=DP,
    reference=FOUR,
    patches=(trainer_built(scaled, "the factor of the context-parallel size was lost"),),
    answers=(
        by_compare(0, "dgrad", "(model) output_layer", "loss.gradient_scaled", says="0.5"),
        by_check(0, "dgrad", "(model) output_layer", "loss.gradient_scaled"),
    ),
)
