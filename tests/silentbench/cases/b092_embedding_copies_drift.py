"""The distributed optimizer takes another range of each copy of the tied embedding.

The copies differ after a step.
"""

from __future__ import annotations

from functools import partial

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE, PP
from silentbench.plants import optimizers, parameters, training_step

TIED = "embedding.word_embeddings.weight output_layer.weight"


def moved(wrapped, instance, args, kwargs):
    weight = parameters(instance).get("output_layer.weight")
    inner = [optimizer.optimizer for optimizer in optimizers(instance)] if weight is not None else []
    for optimizer in inner:
        optimizer.step = partial(_without_the_end, optimizer, weight)
    try:
        return wrapped(*args, **kwargs)
    finally:
        for optimizer in inner:
            del optimizer.step


def _without_the_end(optimizer, weight, *args, **kwargs):
    before = weight.detach()[-8:].clone()
    done = type(optimizer).step(optimizer, *args, **kwargs)
    weight.data[-8:] = before  # beyond the range that it took
    return done


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
