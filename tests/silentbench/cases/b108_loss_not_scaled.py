"""The loss is not scaled although its gradients are divided by the scale: fp16 loses them."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import FP16
from silentbench.plants import trainer_built


def identity(wrapped, instance, args, kwargs):
    wrapped(*args, **kwargs)
    instance.config.grad_scale_func = lambda loss: loss


CASE = case(
    "B108",
    "https://gitcode.com/Ascend/MindSpeed-LLM commit b99afaaa (MR !3343)",
    healthy=FP16,
    patches=(trainer_built(identity, "scale_loss was replaced by the identity"),),
    answers=(
        by_compare(0, "dgrad", "(model) output_layer", "loss.gradient_scaled"),
        by_check(0, "dgrad", "(model) output_layer", "loss.gradient_scaled"),
    ),
)
