"""The model is initialised in bfloat16."""

from __future__ import annotations

from silentbench.answers import by_compare, by_verify
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import model_built


def rounded(wrapped, instance, args, kwargs):
    wrapped(*args, **kwargs)
    for parameter in instance.parameters():
        parameter.data.copy_(parameter.data.bfloat16())


CASE = case(
    "B132",
    "https://github.com/NVIDIA-NeMo/Automodel/issues/2450",
    healthy=ONE,
    patches=(model_built(rounded, "weights were drawn in low precision"),),
    answers=(
        by_compare(-1, "init", "*", "weights.initial_differs"),
        by_verify("weights.cast", says="bfloat16"),
    ),
)
