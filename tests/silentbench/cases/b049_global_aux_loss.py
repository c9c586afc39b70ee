"""The global auxiliary loss is normalised by the tokens of one rank, not of all that it counts."""

from __future__ import annotations

from silentbench.answers import by_compare
from silentbench.case import case, plant
from silentbench.layouts import MIXTURE


def of_this_rank(wrapped, instance, args, kwargs):
    counts, local, _ = wrapped(*args, **kwargs)
    return counts, local, local


GLOBAL = {"transformer": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1}}

CASE = case(
    "B049",
    "https://github.com/NVIDIA/Megatron-LM/issues/7213",
    "https://github.com/NVIDIA/Megatron-LM/issues/3672",
    healthy=MIXTURE.but(world=2, settings=GLOBAL),
    patches=(
        plant(
            "megatron.core.transformer.moe.moe_utils:get_tokens_per_expert_and_token_count",
            of_this_rank,
            "(routing_map, reduce_group, topk, with_padding_mask)",
            "the denominator took local tokens",
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
