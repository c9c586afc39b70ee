"""The backward of the cross entropy gives zeros: it has overwritten the logits that it needs."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.layouts import ONE


def zeros(wrapped, instance, args, kwargs):
    grad, *rest = wrapped(*args, **kwargs)
    return (grad * 0, *rest)


CASE = case(
    "B157",
    "https://github.com/NVIDIA/Megatron-LM/issues/1750",
    healthy=ONE,
    patches=(
        plant(
            "megatron.core.tensor_parallel.cross_entropy:_VocabParallelCrossEntropy.backward",
            zeros,
            "(ctx, grad_output)",
            "a kernel in place",
        ),
    ),
    answers=(
        by_compare(0, "dgrad", "(model) output_layer", "dgrad.value dgrad.scaled loss.gradient_scaled"),
        by_check(
            0,
            "dgrad wgrad reduce clip",
            "*",
            "loss.gradient_not_of_logits symptom.zero_gradient vacuous.no_gradient",
        ),
    ),
)
