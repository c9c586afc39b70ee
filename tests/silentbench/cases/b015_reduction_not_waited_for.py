"""An overlapped reduction is not waited for: the optimizer takes each rank's own gradient.

A dropped handle leaves it to chance what the optimizer reads; here it reads what was there before the
reduction.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import DP, FOUR
from silentbench.plants import grad_sync


def into_a_copy(wrapped, instance, args, kwargs):
    kept = [bucket.grad_data for bucket in instance.buckets]
    for bucket in instance.buckets:
        bucket.grad_data = bucket.grad_data.clone()
    result = wrapped(*args, **kwargs)
    for bucket, own in zip(instance.buckets, kept, strict=True):
        bucket.grad_data = own.mul_(bucket.gradient_scaling_factor)
    return result


CASE = case(
    "B015",
    "https://gitcode.com/Ascend/MindSpeed-LLM commit 6055fb43",
    "https://github.com/NVIDIA/Megatron-LM/commit/3548385ac3",
    "https://github.com/deepspeedai/DeepSpeed/issues/5545",
    healthy=DP.but(settings={"overlap": True}),
    reference=FOUR,
    patches=(grad_sync(into_a_copy, "the handle of the asynchronous reduction was dropped"),),
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
