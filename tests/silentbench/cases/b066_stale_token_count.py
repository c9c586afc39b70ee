"""The dispatcher of a mixture uses what it had counted before: tokens go to wrong experts."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.layouts import MIXTURE

BEFORE = []


def stale(wrapped, instance, args, kwargs):
    tokens, routes, *rest = args
    BEFORE.append(routes)
    if len(BEFORE) < 3:  # two layers: the first microbatch
        return wrapped(*args, **kwargs)
    return wrapped(tokens, BEFORE[-3], *rest, **kwargs)


CASE = case(
    "B066",
    "https://github.com/NVIDIA/Megatron-LM/commit/54d4b3ddbb",
    healthy=MIXTURE.but(steps=1),
    patches=(
        plant(
            "megatron.core.transformer.moe.moe_utils:permute",
            stale,
            "(tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad)",
            "self. was missing",
        ),
    ),
    answers=(
        by_compare(0, "fprop", "decoder.layers.0.mlp.experts*", "fprop.value"),
        by_check(0, "fprop", "decoder.layers.0.mlp.experts", "fprop.tokens_misrouted", roles="input"),
    ),
)
