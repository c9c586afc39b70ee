"""Gradients are never reduced over the data-parallel ranks: a condition is the wrong way round."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import DP, FOUR
from silentbench.plants import grad_sync


def scaled_only(wrapped, instance, args, kwargs):
    for bucket in instance.buckets:
        bucket.grad_data *= bucket.gradient_scaling_factor


CASE = case(
    "B069",
    "https://github.com/NVIDIA/Megatron-LM/commit/80a2d39c93",
    healthy=DP,
    reference=FOUR,
    patches=(grad_sync(scaled_only, "no all-reduce without shards"),),
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
