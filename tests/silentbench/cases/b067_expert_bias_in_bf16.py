"""The router's bias is kept in bfloat16: its small updates are lost."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.layouts import MIXTURE


def nothing(wrapped, instance, args, kwargs):
    return None


FREE = {
    "dtype": "bf16",
    "transformer": {
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": 0.1,
    },
}


CASE = case(
    "B067",
    "https://github.com/NVIDIA/Megatron-LM/commit/8dd03a39cc",
    "https://github.com/NVIDIA/Megatron-LM/issues/1482",
    healthy=MIXTURE.but(settings=FREE, steps=3),
    patches=(
        plant(
            "megatron.core.transformer.moe.router:TopKRouter._maintain_float32_expert_bias",
            nothing,
            "(self)",
            "Float16Module casts the buffer",
        ),
    ),
    answers=(
        by_compare(
            0, "optimizer fprop", "decoder.layers.*.mlp.router*", "layout.kind_differs model.buffer_differs"
        ),
        by_check(
            0,
            "optimizer fprop",
            "decoder.layers.*.mlp.router*",
            "model.buffer_differs buffers.expert_bias_not_recomputed",
        ),
    ),
)
