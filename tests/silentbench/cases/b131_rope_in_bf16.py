"""The table of the rotary embedding is in bfloat16: the error grows with the position."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import model_built


def coarse(wrapped, instance, args, kwargs):
    wrapped(*args, **kwargs)
    instance.rotary_pos_emb.register_forward_hook(lambda module, given, out: out.bfloat16().float())


CASE = case(
    "B131",
    "https://github.com/huggingface/transformers/pull/29285",
    "https://github.com/EleutherAI/gpt-neox/issues/1003",
    healthy=ONE,
    patches=(model_built(coarse, "positions beyond 256 are no bfloat16 numbers"),),
    answers=(
        by_compare(0, "fprop", "rotary_pos_emb", "fprop.value", roles="output"),
        by_check(0, "fprop", "rotary_pos_emb", "fprop.not_of_its_inputs", roles="output"),
    ),
)
