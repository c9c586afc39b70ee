"""A trap: scaling of queries and keys by the number of the layer in its stage.

In float32 the coefficient cancels: nothing that the training computes is wrong beyond rounding.
"""

from __future__ import annotations

from silentbench.case import case
from silentbench.layouts import ONE, PP

SCALED = {"transformer": {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True}}

CASE = case(
    "B075",
    "https://github.com/NVIDIA/Megatron-LM/commit/0504e973d8",
    healthy=PP.but(settings=SCALED),
    faulty=PP.but(settings=SCALED, repeat=1),
    reference=ONE.but(settings=SCALED),
)
