"""For each bucket the whole buffer is scaled, so that a bucket's factor depends on its place.

2 to the power of it.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import DP, FOUR
from silentbench.plants import grad_sync


def once_more_for_each(wrapped, instance, args, kwargs):
    for bucket in instance.buckets:
        parts = bucket.grad_data.chunk(4)  # as if each were a bucket of its own
        for times, part in enumerate(reversed(parts)):
            part.mul_(bucket.gradient_scaling_factor**times)
    return wrapped(*args, **kwargs)


CASE = case(
    "B070",
    "https://github.com/NVIDIA/Megatron-LM/commit/ba456fdad9",
    healthy=DP,
    reference=FOUR,
    patches=(grad_sync(once_more_for_each, "gbuf was scaled instead of bucket"),),
    answers=(
        by_compare(0, "reduce", "*", "reduce.scaled reduce.value", roles="reduced_grad"),
        by_check(0, "reduce", "*", "reduce.not_the_sum"),
    ),
)
