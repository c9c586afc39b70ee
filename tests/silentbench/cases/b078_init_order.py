"""Weights are drawn in another order: two of one shape have each other's values."""

from __future__ import annotations

from silentbench.answers import by_compare, by_verify
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import model_built


def exchanged(wrapped, instance, args, kwargs):
    wrapped(*args, **kwargs)
    one, two = (layer.self_attention.linear_proj.weight.data for layer in instance.decoder.layers)
    kept = one.clone()
    one.copy_(two)
    two.copy_(kept)


CASE = case(
    "B078",
    "https://gitcode.com/Ascend/MindSpeed commit b63f896f",
    healthy=ONE,
    patches=(model_built(exchanged, "the modules were built in another order"),),
    answers=(
        by_compare(
            -1, "init", "decoder.layers.*.self_attention.linear_proj.weight", "weights.initial_differs"
        ),
        by_verify(
            "weights.exchanged weights.initial_differs",
            "decoder.layers.*.self_attention.linear_proj.weight",
        ),
    ),
)
