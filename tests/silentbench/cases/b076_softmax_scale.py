"""The softmax scale of attention leaves out a factor: here 1.1."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import layer_built


def other_scale(wrapped, instance, args, kwargs):
    wrapped(*args, **kwargs)
    instance.self_attention.core_attention.softmax_scale *= 1.1


CASE = case(
    "B076",
    "https://github.com/NVIDIA/Megatron-LM/commit/62f0a9737d",
    "https://gitcode.com/Ascend/MindSpeed commit 4a5b7bde",
    "https://gitcode.com/Ascend/MindSpeed commit b49b42bb",
    "https://github.com/NVIDIA/Megatron-LM/issues/848",
    healthy=ONE,
    patches=(layer_built(other_scale, "mscale_all_dim was not passed on"),),
    answers=(
        by_compare(0, "fprop", "decoder.layers.0.self_attention.core_attention*", "fprop.value"),
        by_check(
            0,
            "fprop",
            "decoder.layers.0.self_attention.core_attention",
            "fprop.not_of_its_inputs",
            roles="output",
        ),
    ),
)
