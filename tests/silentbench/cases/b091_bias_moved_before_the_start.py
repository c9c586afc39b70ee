"""Warming up a graph's capture updates the router's bias: it is not zero when the training begins."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare, by_verify
from silentbench.case import case
from silentbench.layouts import MIXTURE
from silentbench.plants import layer_built

FREE = {
    "transformer": {
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    },
}


def warmed_up(wrapped, instance, args, kwargs):
    wrapped(*args, **kwargs)
    instance.mlp.router.expert_bias[0] += 0.3


CASE = case(
    "B091",
    "https://github.com/NVIDIA/Megatron-LM/commit/481efd020e",
    "https://github.com/NVIDIA/Megatron-LM/pull/4433",
    healthy=MIXTURE.but(settings=FREE),
    patches=(layer_built(warmed_up, "three forwards before the first step"),),
    answers=(
        by_compare(
            0,
            "fprop",
            "decoder.layers.0.mlp.router*",
            "fprop.value weights.initial_differs weights.buffer_differs",
        ),
        by_compare(
            -1, "init", "decoder.layers.*.mlp.router*", "weights.initial_differs weights.buffer_differs"
        ),
        by_verify("weights.initial_differs weights.buffer_differs", "decoder.layers.*.mlp.router*"),
        by_check(-1, "init", "decoder.layers.0.mlp.router.expert_bias", "buffers.expert_bias_not_recomputed"),
    ),
)
