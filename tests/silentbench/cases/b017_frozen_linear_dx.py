"""A frozen column-parallel linear does not sum dX over the tensor-parallel group."""

from __future__ import annotations

from silentbench.case import Answer, case, plant
from silentbench.layouts import ONE, TP

FROZEN = {"frozen": ("decoder.layers.1.mlp.linear_fc1.weight",)}
AROUND = ("decoder.layers.1.mlp", "decoder.layers.1.mlp.linear_fc1", "decoder.layers.1.pre_mlp_layernorm")


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
        Answer(
            by=("compare",),
            step=0,
            phases=("dgrad",),
            fqn=AROUND,
            ids=("parallel.replicas_differ", "dgrad.value"),
        ),
        Answer(by=("check",), step=0, phases=("dgrad",), fqn=AROUND, ids=("parallel.*", "replicas.*")),
    ),
)
