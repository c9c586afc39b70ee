"""The gradient norm counts parameters that every rank has whole once per rank."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.layouts import DP, FOUR


def counted_twice(wrapped, instance, args, kwargs):
    grads, *rest = args
    return wrapped([*grads, *(grad for grad in grads if grad.dim() == 1)], *rest, **kwargs)


GRAD_NORM = plant(
    "megatron.core.optimizer.clip_grads:get_grad_norm_fp32",
    counted_twice,
    "(grads_for_norm, norm_type, grad_stats_parallel_group)",
    "the squared norm of replicated gradients went through the sum over the shards",
)

CASE = case(
    "B141",
    "https://github.com/mindspore-ai/hyper-parallel/issues/279",
    "https://github.com/mindspore-ai/hyper-parallel/issues/735",
    "https://github.com/NVIDIA-NeMo/RL/issues/3788",
    healthy=DP,
    reference=FOUR,
    patches=(GRAD_NORM,),
    answers=(
        by_compare(0, "clip", "*", "optimizer.grad_norm", roles="grad_norm"),
        by_check(0, "clip", "*", "clip.norm_not_of_gradients"),
    ),
)
