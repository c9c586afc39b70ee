"""It is scaled by the tokens of the rank, and divided later by a count that does not know of the split. The
language model's loss and the logged auxiliary loss agree. No line of Megatron is changed.
"""

from __future__ import annotations

from silentbench.answers import by_compare
from silentbench.case import case
from silentbench.layouts import MIXTURE

STRONG = MIXTURE.but(settings={"transformer": {"moe_aux_loss_coeff": 1.0}})
PER_TOKEN = MIXTURE.but(
    settings={"transformer": {"moe_aux_loss_coeff": 1.0, "calculate_per_token_loss": True}}
)
SPLIT = {"tp": 2, "sequence_parallel": True}

CASE = case(
    "B005",
    "https://github.com/NVIDIA/Megatron-LM/pull/5047",
    "https://github.com/NVIDIA/Megatron-LM/commit/9ef8a2a420",
    "https://github.com/NVIDIA/Megatron-LM/issues/1652",
    "https://github.com/NVIDIA/Megatron-LM/issues/3768",
    healthy=STRONG.but(world=2, settings=SPLIT),
    faulty=PER_TOKEN.but(world=2, settings=SPLIT),
    reference=PER_TOKEN,
    twin_reference=STRONG,
    answers=(
        by_compare(
            0,
            "dgrad wgrad",
            "decoder.layers.1.mlp.router*",
            "wgrad.scaled dgrad.value dgrad.scaled wgrad.after_gemm wgrad.own_fault",
        ),
    ),
)
