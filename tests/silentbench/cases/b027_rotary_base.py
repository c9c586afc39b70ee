"""The base of the rotary embedding differs, or whether it interleaves."""

from __future__ import annotations

from silentbench.answers import by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import model_built


def other_base(wrapped, instance, args, kwargs):
    return wrapped(*args, **{**kwargs, "rotary_base": 500_000})


CASE = case(
    "B027",
    "https://gitcode.com/Ascend/MindSpeed-LLM commit 620437ab",
    "https://gitcode.com/Ascend/MindSpeed commit bd6a4822",
    healthy=ONE,
    patches=(model_built(other_base, "rotary_base of another model"),),
    answers=(by_compare(0, "fprop", "rotary_pos_emb", "fprop.value config.differs", roles="output"),),
)
