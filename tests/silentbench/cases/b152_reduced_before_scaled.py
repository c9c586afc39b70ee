"""Some buckets are reduced before they are scaled: they hold the sum of the ranks instead of the mean.

On a device two streams decide which; here it is the first bucket.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import DP, FOUR
from silentbench.plants import trainer_built

BUCKETS = {"ddp": {"bucket_size": 10_000}}


def late(wrapped, instance, args, kwargs):
    wrapped(*args, **kwargs)
    for bucket in instance.model[0].bucket_groups[0].buckets:
        bucket.gradient_scaling_factor = 1.0


CASE = case(
    "B152",
    "https://github.com/NVIDIA/Megatron-LM/issues/3670",
    "https://github.com/NVIDIA/Megatron-LM/commit/3548385ac3",
    healthy=DP.but(settings=BUCKETS),
    reference=FOUR.but(settings=BUCKETS),
    patches=(trainer_built(late, "the scaling was not ordered before the reduction"),),
    answers=(
        by_compare(0, "reduce", "*", "reduce.scaled", roles="reduced_grad", says="2"),
        by_check(0, "reduce", "*", "reduce.not_the_sum"),
    ),
)
