"""The gradients of the tied embedding's two copies, on the first and the last stage, are not added."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.layouts import ONE, PP


def nothing(wrapped, instance, args, kwargs):
    return None


CASE = case(
    "B010",
    "https://github.com/NVIDIA/Megatron-LM/commit/9b55856615",
    "https://github.com/NVIDIA/Megatron-LM/issues/844",
    healthy=PP,
    reference=ONE,
    patches=(
        plant(
            "megatron.core.distributed.finalize_model_grads:_allreduce_word_embedding_grads",
            nothing,
            "(model, config, embd_group, pp_group)",
            "the all-reduce over the embedding group was skipped",
        ),
    ),
    answers=(
        by_compare(
            0,
            "reduce",
            "embedding.word_embeddings.weight output_layer.weight",
            "reduce.value parallel.replicas_differ",
            roles="reduced_grad",
        ),
        by_check(
            0,
            "reduce",
            "embedding.word_embeddings.weight output_layer.weight",
            "parallel.replicas_differ reduce.not_the_sum",
        ),
    ),
)
