"""One operation per layer gives dX too large by 2 percent.

The error grows from the last layer to the first.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import linear_backward


def larger(wrapped, instance, args, kwargs):
    grads = wrapped(*args, **kwargs)
    weight = args[0].saved_tensors[1]
    return (grads[0] * 1.02, *grads[1:]) if weight.shape[0] == 4 * weight.shape[1] else grads


CASE = case(
    "B147",
    "https://github.com/Ascend/pytorch/issues/107",
    healthy=ONE,
    patches=(linear_backward(larger, "one backward kernel of each layer"),),
    answers=(
        by_compare(
            0,
            "dgrad",
            "decoder.layers.1.mlp.linear_fc1 decoder.layers.1.mlp decoder.layers.1.pre_mlp_layernorm",
            "dgrad.scaled",
        ),
        by_check(
            0, "dgrad", "decoder.layers.1.mlp.linear_fc1", "dgrad.not_of_its_inputs", roles="grad_input"
        ),
    ),
)
