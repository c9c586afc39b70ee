"""A checkpoint was converted through float16: the weights have lost their low bits."""

from __future__ import annotations

from silentbench.answers import by_compare, by_verify
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import model_built


def rounded(wrapped, instance, args, kwargs):
    wrapped(*args, **kwargs)
    for parameter in instance.parameters():
        parameter.data.copy_(parameter.data.half())


CASE = case(
    "B115",
    "https://gitcode.com/Ascend/MindSpeed-LLM commit 1cd3206f (MR !1147)",
    healthy=ONE,
    patches=(model_built(rounded, "the converter did not say the type"),),
    answers=(
        by_compare(-1, "init", "*", "weights.initial_differs"),
        by_verify("weights.cast", says="float16"),
    ),
)
