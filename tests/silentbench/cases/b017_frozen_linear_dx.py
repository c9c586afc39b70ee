"""A frozen column-parallel linear does not sum dX over the tensor-parallel group."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.layouts import ONE, TP

FROZEN = {"frozen": ("decoder.layers.1.mlp.linear_fc1.weight",)}


def not_reduced(wrapped, instance, args, kwargs):
    args[0].allreduce_dgrad = False
    return wrapped(*args, **kwargs)


CASE = case(
    "B017",
    "https://github.com/NVIDIA/Megatron-LM/commit/5fffdfc737",
    healthy=TP.but(settings=FROZEN),
    reference=ONE.but(settings=FROZEN),
    patches=(
        plant(
            "megatron.core.tensor_parallel.layers:LinearWithFrozenWeight.backward",
            not_reduced,
            "(ctx, grad_output)",
            "the backward of a frozen linear had no all-reduce",
        ),
    ),
    answers=(
        by_compare(
            0,
            "dgrad",
            "decoder.layers.1.mlp decoder.layers.1.mlp.linear_fc1 decoder.layers.1.pre_mlp_layernorm",
            "parallel.replicas_differ dgrad.value",
        ),
        by_check(
            0,
            "dgrad",
            "decoder.layers.1.mlp decoder.layers.1.mlp.linear_fc1 decoder.layers.1.pre_mlp_layernorm",
            "parallel.replicas_differ",
        ),
    ),
)
