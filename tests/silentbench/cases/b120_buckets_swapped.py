"""Buckets are swapped before they were copied: one is reduced with the numbers of its neighbour."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import DP, FOUR
from silentbench.plants import grad_sync


def swapped(wrapped, instance, args, kwargs):
    (bucket, *_) = instance.buckets
    result = wrapped(*args, **kwargs)
    bucket.grad_data.copy_(bucket.grad_data.roll(4096))
    return result


CASE = case(
    "B120",
    "https://github.com/deepspeedai/DeepSpeed/issues/5523",
    "https://github.com/deepspeedai/DeepSpeed/issues/7188",
    "https://github.com/EleutherAI/gpt-neox/issues/1004",
    healthy=DP,
    reference=FOUR,
    patches=(grad_sync(swapped, "the bucket was swapped before the copy"),),
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
