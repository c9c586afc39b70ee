"""The gradients of the tied embedding's two copies, on the first and the last stage, are not added."""

from __future__ import annotations

from silentbench.case import Answer, case, plant
from silentbench.layouts import ONE, PP

TIED = ("embedding.word_embeddings.weight", "output_layer.weight")


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
        Answer(
            by=("compare",),
            step=0,
            phases=("reduce",),
            fqn=TIED,
            roles=("reduced_grad",),
            ids=("reduce.value", "parallel.replicas_differ", "reduce.*tied*"),
        ),
        Answer(
            by=("check",), step=0, phases=("reduce",), fqn=TIED, ids=("parallel.*", "replicas.*", "*tied*")
        ),
    ),
)
