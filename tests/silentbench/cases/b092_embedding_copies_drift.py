"""The distributed optimizer takes another range of each copy of the tied embedding.

The copies differ after a step.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE, PP
from silentbench.plants import parameters, training_step

TIED = "embedding.word_embeddings.weight output_layer.weight"


def moved(wrapped, instance, args, kwargs):
    weight = parameters(instance).get("output_layer.weight")
    if weight is not None:
        finish = instance.optimizer.step

        def step():
            before = weight.detach()[-8:].clone()
            done = finish()
            weight.data[-8:] = before  # beyond the range that it took
            return done

        instance.optimizer.step = step
    try:
        return wrapped(*args, **kwargs)
    finally:
        if weight is not None:
            instance.optimizer.step = finish


CASE = case(
    "B092",
    "https://github.com/NVIDIA/Megatron-LM/commit/ba8f2defc5",
    "https://github.com/NVIDIA/Megatron-LM/issues/835",
    "https://github.com/NVIDIA/Megatron-LM/issues/844",
    healthy=PP,
    reference=ONE,
    patches=(training_step(moved, "the copies' buckets were padded differently"),),
    answers=(
        by_compare(
            0, "optimizer", TIED, "parallel.replicas_differ optimizer.update", roles="param master_param"
        ),
        by_check(0, "optimizer", TIED, "parallel.replicas_differ optimizer.update_not_recomputed"),
    ),
)
