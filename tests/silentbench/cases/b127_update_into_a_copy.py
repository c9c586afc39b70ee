"""The optimizer's kernel writes into a copy of a parameter that is not contiguous.

The parameter never moves.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.layouts import ONE

PLACE = "decoder.layers.*.self_attention.linear_proj.weight"


def into_a_copy(wrapped, instance, args, kwargs):
    square = [p for group in instance.param_groups for p in group["params"] if p.shape == (32, 32)]
    kept = [parameter.detach().clone() for parameter in square]
    result = wrapped(*args, **kwargs)
    for parameter, before in zip(square, kept, strict=True):
        parameter.data.copy_(before)
    return result


CASE = case(
    "B127",
    "blog post 2025: PyTorch MPS addcmul_/addcdiv_ on non-contiguous output",
    healthy=ONE,
    patches=(plant("torch.optim.adamw:AdamW.step", into_a_copy, "(self, closure)", "addcmul_ into a copy"),),
    answers=(
        by_compare(0, "optimizer", PLACE, "optimizer.parameters_unmoved optimizer.update", roles="param"),
        by_check(0, "optimizer", PLACE, "optimizer.parameters_unmoved optimizer.update_not_recomputed"),
    ),
)
