"""Attention ignores the strides of V, which is not contiguous."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import attention, misread


def careless(wrapped, instance, args, kwargs):
    query, key, value, *rest = args
    return wrapped(query, key, misread(value), *rest, **kwargs)


CASE = case(
    "B163",
    "https://github.com/vllm-project/vllm-ascend/issues/95",
    healthy=ONE,
    patches=(attention(careless, "value.contiguous() was left out"),),
    answers=(
        by_compare(
            0, "fprop", "decoder.layers.0.self_attention.core_attention*", "fprop.value", roles="output"
        ),
        by_check(
            0,
            "fprop",
            "decoder.layers.0.self_attention.core_attention",
            "fprop.not_of_its_inputs",
            roles="output",
        ),
    ),
)
