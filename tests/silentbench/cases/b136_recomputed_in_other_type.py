"""Activations are recomputed in another precision: the context is not entered again."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import checkpointed, mlp_forward

AGAIN = [False]


def coarse_again(wrapped, instance, args, kwargs):
    ctx, function, *rest = args
    calls = [0]

    def counted(*inputs):
        calls[0] += 1
        AGAIN[0] = calls[0] > 1
        try:
            return function(*inputs)
        finally:
            AGAIN[0] = False

    return wrapped(ctx, counted, *rest, **kwargs)


def coarse(wrapped, instance, args, kwargs):
    output, bias = wrapped(*args, **kwargs)
    return (output + (output.bfloat16().float() - output).detach() if AGAIN[0] else output), bias


CASE = case(
    "B136",
    "https://github.com/NVIDIA/Megatron-LM/issues/7538",
    healthy=ONE.but(settings={"recompute": True}),
    patches=(
        checkpointed(coarse_again, "autocast is not entered again"),
        mlp_forward(coarse, "a kernel of the outer precision"),
    ),
    answers=(
        by_compare(0, "fprop", "decoder.layers.1.mlp*", "fprop.recomputed_differs"),
        by_check(0, "fprop", "decoder.layers.1.mlp*", "fprop.recomputed_differs"),
    ),
)
