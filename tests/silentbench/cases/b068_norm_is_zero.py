"""The gradient norm is zero: it reads an attribute that this optimizer does not fill. Nothing is clipped."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import grad_norm


def zero(wrapped, instance, args, kwargs):
    return wrapped([grad * 0 for grad in args[0]], *args[1:], **kwargs)


CASE = case(
    "B068",
    "https://github.com/NVIDIA/Megatron-LM/commit/972553db35",
    "https://github.com/NVIDIA/Megatron-LM/commit/a82fa72d52",
    healthy=ONE,
    patches=(grad_norm(zero, "decoupled_grad was not read"),),
    answers=(
        by_compare(0, "clip", "*", "optimizer.grad_norm", roles="grad_norm"),
        by_check(0, "clip", "*", "clip.norm_not_of_gradients"),
    ),
)
