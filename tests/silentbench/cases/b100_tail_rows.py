"""A kernel leaves out the rows that do not fill a block: the last tokens of a norm are zero."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import layer_built


def without_tail(wrapped, instance, args, kwargs):
    wrapped(*args, **kwargs)
    if instance.layer_number != 1:
        return

    def hook(module, given, output):
        kept = output.clone()
        kept[-2:] = 0  # of 32 tokens, with blocks of 30
        return kept

    instance.input_layernorm.register_forward_hook(hook)


CASE = case(
    "B100",
    "https://gitcode.com/Ascend/MindSpeed commit 93970345",
    healthy=ONE,
    patches=(layer_built(without_tail, "T // BT blocks of rows"),),
    answers=(
        by_compare(0, "fprop", "decoder.layers.0.input_layernorm", "fprop.value", roles="output"),
        by_check(0, "fprop", "decoder.layers.0.input_layernorm", "fprop.not_of_its_inputs fprop.zero_rows"),
    ),
)
