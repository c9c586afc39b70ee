"""Parameters are used before their overlapped gather has ended: those of other ranks are a step old."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.layouts import DISTOPT, FOUR


def stale(wrapped, instance, args, kwargs):
    import torch.distributed as dist

    kept = [bucket.param_data.clone() for bucket in instance.buckets]
    result = wrapped(*args, **{**kwargs, "force_sync": True})
    for bucket, before in zip(instance.buckets, kept, strict=True):
        size = before.numel() // dist.get_world_size()
        own = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
        before[own] = bucket.param_data[own]
        bucket.param_data.copy_(before)
    return result


GATHER = plant(
    "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_param_sync",
    stale,
    "(self, force_sync)",
    "the gather was not waited for",
)

CASE = case(
    "B124",
    "Ascend practical case",
    healthy=DISTOPT,
    reference=FOUR,
    patches=(GATHER,),
    answers=(
        by_compare(0, "optimizer", "*", "parallel.replicas_differ optimizer.update", roles="param"),
        by_check(0, "optimizer", "*", "parallel.replicas_differ optimizer.update_not_recomputed"),
    ),
)
