"""Weights were converted wrongly: the gate and the up projection of a gated MLP are swapped."""

from __future__ import annotations

from silentbench.answers import by_compare, by_verify
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import layer_built


def swapped(wrapped, instance, args, kwargs):
    wrapped(*args, **kwargs)
    weight = instance.mlp.linear_fc1.weight.data
    weight.copy_(weight.roll(weight.shape[0] // 2, dims=0).clone())


CASE = case(
    "B164",
    "https://github.com/vllm-project/vime/issues/274",
    healthy=ONE.but(settings={"swiglu": True}),
    patches=(layer_built(swapped, "raw conversion"),),
    answers=(
        by_compare(-1, "init", "decoder.layers.*.mlp.linear_fc1.weight", "weights.initial_differs"),
        by_verify("weights.permuted", "decoder.layers.*.mlp.linear_fc1.weight"),
    ),
)
