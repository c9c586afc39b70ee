"""The output of the second layer's MLP is detached: the MLP gets no gradient, all before it too little."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import layer_built

MLP = ("decoder.layers.1.mlp*",)


def detached(wrapped, instance, args, kwargs):
    wrapped(*args, **kwargs)
    if instance.layer_number == 2:
        instance.mlp.register_forward_hook(lambda module, given, out: (out[0].detach(), *out[1:]))


CASE = case(
    "B035",
    "https://gitcode.com/Ascend/MindSpeed-LLM commit 52d8a80e",
    "https://gitcode.com/Ascend/MindSpeed-LLM commit 7f760f44",
    "https://gitcode.com/Ascend/MindSpeed commit e1ec3638",
    "https://github.com/NVIDIA/Megatron-LM/issues/4765",
    healthy=ONE,
    patches=(layer_built(detached, "a branch was cut off the graph"),),
    answers=(
        by_compare(
            0,
            "dgrad wgrad accumulate reduce",
            "decoder.layers.1.mlp*",
            "wgrad.missing dgrad.missing model.frozen_parameter",
        ),
        by_check(
            0,
            "dgrad wgrad accumulate reduce optimizer",
            "decoder.layers.1.mlp*",
            "wgrad.missing symptom.zero_gradient",
        ),
    ),
    quick=True,
)
