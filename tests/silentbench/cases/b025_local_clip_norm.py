"""The gradient norm is each rank's own: it was not reduced over the model-parallel group."""

from __future__ import annotations

from silentbench.case import Answer, case, plant
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
        Answer(
            by=("compare",),
            step=0,
            phases=("clip",),
            fqn=("*",),
            roles=("grad_norm",),
            ids=("optimizer.grad_norm",),
        ),
        Answer(
            by=("check",), step=0, phases=("clip",), fqn=("*",), ids=("*norm*", "parallel.*", "replicas.*")
        ),
    ),
)
