"""dX of the experts is wrong while their output and dW are right."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import MIXTURE
from silentbench.plants import layer_built, linear_backward


def marked(wrapped, instance, args, kwargs):
    wrapped(*args, **kwargs)
    for expert in instance.mlp.experts.local_experts:
        expert.linear_fc1.weight.expert = True


def halved(wrapped, instance, args, kwargs):
    grads = wrapped(*args, **kwargs)
    weight = args[0].saved_tensors[1]
    return (grads[0] * 0.5, *grads[1:]) if hasattr(weight, "expert") else grads


CASE = case(
    "B155",
    "https://github.com/linkedin/Liger-Kernel/issues/1413",
    healthy=MIXTURE,
    patches=(
        layer_built(marked, "of experts alone"),
        linear_backward(halved, "two products into one accumulator"),
    ),
    answers=(
        by_compare(0, "dgrad", "decoder.layers.1.mlp.experts*", "dgrad.scaled dgrad.value"),
        by_check(
            0,
            "dgrad",
            "decoder.layers.1.mlp.experts.*.linear_fc1",
            "dgrad.not_of_its_inputs",
            roles="grad_input",
        ),
    ),
)
