"""The gradients of some parameters are doubled after every microbatch.

A reduce-scatter in a group of one aliases the buffer and adds it to itself: 2 to the number of microbatches.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.layouts import ONE
from silentbench.plants import parameters


def doubled(wrapped, instance, args, kwargs):
    result = wrapped(*args, **kwargs)
    finish = instance.config.grad_scale_func  # called before the backward of each microbatch

    def after_the_last_one(loss):
        for name, parameter in parameters(instance).items():
            if ".mlp." in name:
                parameter.main_grad.mul_(2)
        return loss

    instance.config.grad_scale_func = lambda loss: finish(after_the_last_one(loss))
    return result


CASE = case(
    "B150",
    "https://github.com/NVIDIA/Megatron-LM/issues/6660",
    healthy=ONE,
    patches=(
        plant(
            "mindspeed_precision.testing.trainer:CpuTrainer._build",
            doubled,
            "(self)",
            "the buffer was added to itself",
        ),
    ),
    answers=(
        by_compare(
            0,
            "accumulate",
            "decoder.layers.*.mlp.*",
            "wgrad.stale_main_grad accumulate.changed_between",
            roles="main_grad",
        ),
        by_check(
            0,
            "accumulate",
            "decoder.layers.*.mlp.*",
            "wgrad.stale_main_grad accumulate.changed_between",
            roles="main_grad",
        ),
    ),
)
