"""The gradient norm leaves out experts: those of one rank are taken for copies of another's."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.layouts import MIXTURE


def without_experts(wrapped, instance, args, kwargs):
    import torch.distributed as dist

    grads = wrapped(*args, **kwargs)
    experts = any(group.get("is_expert_parallel") and group["params"] for group in instance.param_groups)
    return [grad * 0 for grad in grads] if experts and dist.get_rank() else grads


CASE = case(
    "B058",
    "https://github.com/NVIDIA/Megatron-LM/commit/cd4afffa64",
    "https://github.com/NVIDIA/Megatron-LM/pull/5916",
    healthy=MIXTURE.but(world=2, settings={"ep": 2}),
    reference=MIXTURE.but(settings={"microbatches": 4}),
    patches=(
        plant(
            "megatron.core.optimizer.optimizer:MegatronOptimizer.get_main_grads_for_grad_norm",
            without_experts,
            "(self)",
            "experts were filtered as duplicates",
        ),
    ),
    answers=(
        by_compare(0, "clip", "*", "optimizer.grad_norm", roles="grad_norm"),
        by_check(0, "clip", "*", "clip.norm_not_of_gradients"),
    ),
)
