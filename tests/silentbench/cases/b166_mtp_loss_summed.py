"""The loss of multi-token prediction is summed over depths, not averaged: twice the gradient."""

from __future__ import annotations

from silentbench.answers import by_compare
from silentbench.case import case, plant
from silentbench.cases.b052_no_valid_token import MTP


def summed(wrapped, instance, args, kwargs):
    output, loss = wrapped(*args, **kwargs)
    return output, loss * 2


CASE = case(
    "B166",
    "https://github.com/NVIDIA/Megatron-LM/issues/1532",
    healthy=MTP,
    patches=(
        plant(
            "megatron.core.transformer.multi_token_prediction:MTPLossAutoScaler.backward",
            summed,
            "(ctx, grad_output)",
            "not divided by the number of depths",
        ),
    ),
    answers=(by_compare(0, "dgrad", "output_layer mtp*", "dgrad.scaled loss.gradient_scaled"),),
)
