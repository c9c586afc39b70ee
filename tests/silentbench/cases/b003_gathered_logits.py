"""parallel_output=False under tensor parallelism: the loss is too high by log(TP).

The model gathers the logits and still applies the vocabulary-parallel cross entropy, so that the partition
function is summed once per rank.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE, TP
from silentbench.plants import model_built


def gathered(wrapped, instance, args, kwargs):
    return wrapped(*args, **{**kwargs, "parallel_output": False})


CASE = case(
    "B003",
    "https://github.com/NVIDIA/Megatron-LM/issues/7452",
    healthy=TP,
    reference=ONE,
    patches=(model_built(gathered, "the user asks for gathered logits; no line of Megatron is changed"),),
    answers=(
        by_compare(
            0,
            "fprop loss",
            "output_layer (model)",
            "fprop.loss layout.kind_differs",
        ),
        by_check(
            0,
            "fprop loss",
            "output_layer (model)",
            "loss.not_of_token_losses reduce.copies_summed",
        ),
    ),
)
