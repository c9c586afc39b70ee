"""Only what the last microbatch adds to the gradient is reduced.

What the ones before left stays on each rank.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.layouts import DP, FOUR
from silentbench.plants import grad_sync


def keep(wrapped, instance, args, kwargs):
    groups = [group for chunk in instance.model for group in chunk.bucket_groups]
    for bucket in (bucket for group in groups for bucket in group.buckets):
        bucket.local = bucket.grad_data.clone()  # before the last microbatch: what the others left
    return wrapped(*args, **kwargs)


def rest_only(wrapped, instance, args, kwargs):
    for bucket in instance.buckets:
        bucket.grad_data -= bucket.local
    result = wrapped(*args, **kwargs)
    for bucket in instance.buckets:
        bucket.grad_data += bucket.local * bucket.gradient_scaling_factor
    return result


NO_SYNC = (
    plant(
        "mindspeed_precision.testing.trainer:CpuTrainer._forward_step",
        keep,
        "(self, data_iterator, model)",
        "the gradient before each microbatch",
    ),
    grad_sync(rest_only, "set_requires_gradient_sync(False) left earlier microbatches out of the reduction"),
)

CASE = case(
    "B142",
    "https://github.com/mindspore-ai/hyper-parallel/issues/437",
    healthy=DP,
    reference=FOUR,
    patches=NO_SYNC,
    answers=(
        by_compare(
            0,
            "reduce",
            "*",
            "parallel.replicas_differ reduce.value reduce.scaled reduce.own_fault",
            roles="reduced_grad",
        ),
        by_check(0, "reduce", "*", "parallel.replicas_differ reduce.not_the_sum"),
    ),
)
