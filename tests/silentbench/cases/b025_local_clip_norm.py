"""The gradient norm is each rank's own: it was not reduced over the model-parallel group."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.layouts import ONE, TP


def own_norm(wrapped, instance, args, kwargs):
    return sum(float(grad.float().norm()) ** 2 for grad in args[0]) ** 0.5


CASE = case(
    "B025",
    "https://github.com/NVIDIA/Megatron-LM/commit/6191ff593f",
    "https://github.com/NVIDIA/Megatron-LM/commit/abf10f8590",
    "https://gitcode.com/Ascend/MindSpeed-LLM commit 6cfe2385",
    healthy=TP,
    reference=ONE,
    patches=(
        plant(
            "megatron.core.optimizer.clip_grads:get_grad_norm_fp32",
            own_norm,
            "(grads_for_norm, norm_type, grad_stats_parallel_group)",
            "the norm was reduced over no group",
        ),
    ),
    answers=(
        by_compare(0, "clip", "*", "optimizer.grad_norm parallel.replicas_differ", roles="grad_norm"),
        by_check(0, "clip", "*", "clip.norm_not_of_gradients parallel.replicas_differ"),
    ),
)
