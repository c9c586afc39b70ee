"""Both pipeline stages number their layers from the same offset: names occur twice, and others never."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare, by_verify
from silentbench.case import case, plant
from silentbench.layouts import ONE, PP


def none(wrapped, instance, args, kwargs):
    return 0


CASE = case(
    "B090",
    "https://github.com/NVIDIA/Megatron-LM/commit/d10eb6fc89",
    "https://github.com/NVIDIA/Megatron-LM/pull/3399",
    healthy=PP,
    reference=ONE,
    patches=(
        plant(
            "megatron.core.transformer.transformer_layer:get_transformer_layer_offset",
            none,
            "(config, vp_stage, pp_rank)",
            "the offset of the stage was left out",
        ),
    ),
    answers=(
        by_compare(-1, "init", "decoder.layers.*", "weights.initial_differs coverage.unmatched_records"),
        by_verify("weights.missing optimizer.groups_differ", "decoder.layers.*"),
        by_check(-1, "init", "decoder.layers.*", "parallel.replicas_differ"),
    ),
)
