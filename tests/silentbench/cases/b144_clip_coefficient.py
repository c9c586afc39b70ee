"""The clipping coefficient is computed from a norm that was rounded to bfloat16: only seen while it clips."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.layouts import ONE


def from_rounded(wrapped, instance, args, kwargs):
    import torch

    given = dict(zip(("parameters", "max_norm", "total_norm", "use_decoupled_grad"), args, strict=False))
    given |= kwargs
    given["total_norm"] = float(torch.tensor(float(given["total_norm"])).bfloat16())
    return wrapped(**given)


CASE = case(
    "B144",
    "https://github.com/mindspore-ai/hyper-parallel/issues/446",
    healthy=ONE,
    patches=(
        plant(
            "megatron.core.optimizer.clip_grads:clip_grad_by_total_norm_fp32",
            from_rounded,
            "(parameters, max_norm, total_norm, use_decoupled_grad)",
            "norm and coefficient were computed otherwise",
        ),
    ),
    answers=(
        by_compare(0, "clip", "*", "optimizer.clip"),
        by_check(0, "clip", "*", "clip.wrong_factor"),
    ),
)
