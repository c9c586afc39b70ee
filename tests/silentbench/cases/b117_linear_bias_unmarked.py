"""A linear loses its ``sequence_parallel`` mark.

The bias of a row-parallel linear is not summed over the group.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE, SP
from silentbench.plants import layer_built

PLACE = "decoder.layers.*.self_attention.linear_proj.bias"


def unmarked(wrapped, instance, args, kwargs):
    wrapped(*args, **kwargs)
    instance.self_attention.linear_proj.bias.sequence_parallel = False


CASE = case(
    "B117",
    "https://gitcode.com/Ascend/MindSpeed-LLM commit 87801c39",
    healthy=SP,
    reference=ONE,
    patches=(layer_built(unmarked, "the attribute was set before the parent's __init__"),),
    answers=(
        by_compare(0, "reduce", PLACE, "parallel.replicas_differ", roles="reduced_grad"),
        by_check(0, "reduce", PLACE, "parallel.replicas_differ"),
    ),
)
