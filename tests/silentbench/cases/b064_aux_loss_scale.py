"""The router's auxiliary loss has twice the weight it should have."""

from __future__ import annotations

from silentbench.answers import by_compare
from silentbench.case import case, plant
from silentbench.layouts import MIXTURE


def doubled(wrapped, instance, args, kwargs):
    return wrapped(*args, **kwargs) * 2


CASE = case(
    "B064",
    "https://github.com/NVIDIA/Megatron-LM/commit/f6e0d425a5",
    healthy=MIXTURE,
    patches=(
        plant(
            "megatron.core.transformer.moe.router:TopKRouter.get_aux_loss_coeff",
            doubled,
            "(self, aux_loss_type)",
            "it was not divided by the context-parallel size",
        ),
    ),
    answers=(
        by_compare(
            0,
            "dgrad wgrad",
            "decoder.layers.1.mlp.router*",
            "wgrad.value wgrad.after_gemm wgrad.operand_value wgrad.own_fault wgrad.scaled "
            "dgrad.value dgrad.scaled",
        ),
    ),
)
