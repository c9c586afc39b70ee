"""For each bucket the whole buffer is scaled, so that a bucket's factor depends on its place.

2 to the power of it.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import DP, FOUR
from silentbench.plants import grad_sync, trainer_built

BUCKETS = {"ddp": {"bucket_size": 10_000}}
GROUPS = []


def remember(wrapped, instance, args, kwargs):
    wrapped(*args, **kwargs)
    GROUPS[:] = instance.model[0].bucket_groups


def all_of_them(wrapped, instance, args, kwargs):
    for bucket in (bucket for group in GROUPS if group is not instance for bucket in group.buckets):
        bucket.grad_data *= bucket.gradient_scaling_factor
    return wrapped(*args, **kwargs)


CASE = case(
    "B070",
    "https://github.com/NVIDIA/Megatron-LM/commit/ba456fdad9",
    healthy=DP.but(settings=BUCKETS),
    reference=FOUR.but(settings=BUCKETS),
    patches=(
        trainer_built(remember, "the buckets of one buffer"),
        grad_sync(all_of_them, "gbuf was scaled instead of bucket"),
    ),
    answers=(
        by_compare(0, "reduce", "*", "reduce.scaled reduce.value", roles="reduced_grad"),
        by_check(0, "reduce", "*", "reduce.not_the_sum"),
    ),
)
