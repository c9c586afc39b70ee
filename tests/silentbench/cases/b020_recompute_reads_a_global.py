"""Recomputation reads a global that the next microbatch has overwritten.

The length of the sequences is kept in a module; with a pipeline of two stages the first one recomputes
microbatch 0 after the forward of microbatch 1. One stage alone never shows it. The twin keeps the value
with the checkpoint.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.layouts import PP
from silentbench.plants import attention

LENGTH = {"now": 0, "seen": 0}


def next_length(wrapped, instance, args, kwargs):
    LENGTH["seen"] += 1
    LENGTH["now"] = LENGTH["seen"] % 2
    return wrapped(*args, **kwargs)


def masked_by_length(wrapped, instance, args, kwargs):
    query, key, value, mask, *rest = args
    mask = mask.clone()
    mask[..., 8:, LENGTH["now"]] = True  # who comes later does not see that token
    return wrapped(query, key, value, mask, *rest, **kwargs)


def with_its_length(wrapped, instance, args, kwargs):
    ctx, function, *rest = args
    kept = LENGTH["now"]

    def restored(*inputs):
        now, LENGTH["now"] = LENGTH["now"], kept
        try:
            return function(*inputs)
        finally:
            LENGTH["now"] = now

    return wrapped(ctx, restored, *rest, **kwargs)


GLOBAL = PP.but(
    settings={"recompute": True},
    patches=(
        plant(
            "mindspeed_precision.testing.trainer:CpuTrainer._forward_step",
            next_length,
            "(self, data_iterator, model)",
            "each microbatch sets the length for all that follows",
        ),
        attention(masked_by_length, "attention reads the length from a global"),
    ),
)
KEPT = plant(
    "megatron.core.tensor_parallel.random:CheckpointFunction.forward",
    with_its_length,
    "(ctx, run_function, distribute_saved_activations, *args)",
    "the checkpoint brings its own length back",
)

CASE = case(
    "B020",
    "https://gitcode.com/Ascend/MindSpeed-LLM commit 0c0411e0 (MR !2658)",
    "https://gitcode.com/Ascend/MindSpeed-LLM commit 3d86279d",
    healthy=GLOBAL.but(patches=(*GLOBAL.patches, KEPT)),
    faulty=GLOBAL,
    answers=(
        by_compare(0, "fprop", "decoder.layers.0.self_attention*", "fprop.recomputed_differs", ranks=(0,)),
        by_check(0, "fprop", "decoder.layers.0.self_attention*", "fprop.recomputed_differs", ranks=(0,)),
    ),
)
