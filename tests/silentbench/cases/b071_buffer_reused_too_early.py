"""The buffer of a reduction is used again before the communication has ended.

Half of a bucket is overwritten.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import DP, FOUR
from silentbench.plants import grad_sync


def overwritten(wrapped, instance, args, kwargs):
    (bucket, *_) = instance.buckets
    own = bucket.grad_data.clone()
    result = wrapped(*args, **kwargs)
    half = own.numel() // 2
    bucket.grad_data[half:] = own[:half].mul_(bucket.gradient_scaling_factor)[: own.numel() - half]
    return result


CASE = case(
    "B071",
    "https://github.com/NVIDIA/Megatron-LM/commit/55638bc443",
    healthy=DP,
    reference=FOUR,
    patches=(grad_sync(overwritten, "the second buffer was taken before the first was sent"),),
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
