"""Some buckets are reduced before they are scaled: they hold the sum of the ranks instead of the mean.

On a device two streams decide which; here it is the first half.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import DP, FOUR
from silentbench.plants import grad_sync


def half_before(wrapped, instance, args, kwargs):
    for bucket in instance.buckets:
        first = bucket.grad_data[: bucket.grad_data.numel() // 2]
        first /= bucket.gradient_scaling_factor  # what scales all of it comes too late for this half
    return wrapped(*args, **kwargs)


CASE = case(
    "B152",
    "https://github.com/NVIDIA/Megatron-LM/issues/3670",
    "https://github.com/NVIDIA/Megatron-LM/commit/3548385ac3",
    healthy=DP,
    reference=FOUR,
    patches=(grad_sync(half_before, "the scaling was not ordered before the reduction"),),
    answers=(
        by_compare(0, "reduce", "*", "reduce.scaled", roles="reduced_grad", says="2"),
        by_check(0, "reduce", "*", "reduce.not_the_sum"),
    ),
)
