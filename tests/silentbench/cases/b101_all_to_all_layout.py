"""The all-to-all before attention mixes samples and positions where a microbatch has several samples."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import attention


def mixed(wrapped, instance, args, kwargs):
    query, *rest = args
    moved = query.transpose(0, 1).reshape(query.shape)  # [b, s, ...] taken for [s, b, ...]
    return wrapped(moved, *rest, **kwargs)


CASE = case(
    "B101",
    "https://gitcode.com/Ascend/MindSpeed commit c303a051",
    "https://gitcode.com/Ascend/MindSpeed commit 13bdb602",
    "https://gitcode.com/Ascend/MindSpeed commit 9d30bcf0",
    healthy=ONE,
    patches=(attention(mixed, "transposition for a batch of one"),),
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
