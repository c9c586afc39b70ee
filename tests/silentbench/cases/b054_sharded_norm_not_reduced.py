"""A norm over heads is whole on every tensor-parallel rank and sees only its heads.

Its gradient is not summed.

Here the norm of the queries and keys; in Megatron the output norm of a gated delta net, without sequence
parallelism.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.layouts import ONE, TP


def with_head_norms(wrapped, instance, args, kwargs):
    return wrapped(*args, **{**kwargs, "qk_layernorm": True})


def nothing(wrapped, instance, args, kwargs):
    return None


NORMS = {"transformer": {"qk_layernorm": True}}
SPEC = plant(
    "megatron.core.models.gpt.gpt_layer_specs:get_gpt_layer_local_spec",
    with_head_norms,
    "(num_experts, moe_grouped_gemm, qk_layernorm, multi_latent_attention, fp8, "
    "moe_use_legacy_grouped_gemm, normalization, qk_l2_norm, use_kitchen, "
    "use_kitchen_attention, kitchen_attention_backend)",
    "norms of queries and keys",
)
PLACE = "decoder.layers.*.self_attention.q_layernorm.* decoder.layers.*.self_attention.k_layernorm.*"

CASE = case(
    "B054",
    "https://github.com/NVIDIA/Megatron-LM/issues/7452",
    healthy=TP.but(settings=NORMS, patches=(SPEC,)),
    reference=ONE.but(settings=NORMS, patches=(SPEC,)),
    patches=(
        plant(
            "megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads",
            nothing,
            "(model, config, tp_group)",
            "the reduction hung on the flag of sequence parallelism",
        ),
    ),
    answers=(
        by_compare(0, "reduce", PLACE, "parallel.replicas_differ reduce.value", roles="reduced_grad"),
        by_check(0, "reduce", PLACE, "parallel.replicas_differ"),
    ),
)
