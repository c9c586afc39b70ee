"""GELU by its tanh approximation on one side: 3e-7 of the loss, 1e-4 of the gradients."""

from __future__ import annotations

from functools import partial

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import layer_built


def approximate(wrapped, instance, args, kwargs):
    from torch.nn.functional import gelu

    wrapped(*args, **kwargs)
    instance.mlp.activation_func = partial(gelu, approximate="tanh")


CASE = case(
    "B030",
    'Ascend msprobe train_debug_guide case "GELU operator"',
    healthy=ONE,
    patches=(layer_built(approximate, "another approximation of GELU"),),
    answers=(
        by_compare(0, "fprop", "decoder.layers.0.mlp decoder.layers.0.mlp.linear_fc2", "fprop.value"),
        by_check(0, "fprop", "decoder.layers.0.mlp.linear_fc2", "fprop.not_of_its_inputs", roles="input"),
    ),
)
