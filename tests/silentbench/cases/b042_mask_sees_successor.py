"""The attention mask is shifted: a token sees its successor."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import attention


def shifted(wrapped, instance, args, kwargs):
    query, key, value, mask, *rest = args
    mask = mask.roll(1, dims=-1)
    mask[..., 0] = False
    return wrapped(query, key, value, mask, *rest, **kwargs)


CASE = case(
    "B042",
    "Ascend case: FA varlen mask [5079,5079] instead of [3577,3577], grad overflow step 0",
    "https://gitcode.com/Ascend/MindSpeed-LLM commit e83af7c2",
    "https://gitcode.com/Ascend/MindSpeed-LLM commit aa419d89",
    "https://gitcode.com/Ascend/MindSpeed-LLM commit 0202ac93",
    healthy=ONE,
    patches=(attention(shifted, "the mask was made for another length"),),
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
