"""The average of a collective is a sum on this backend.

Every gradient is too large by the number of ranks.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import DISTOPT, FOUR
from silentbench.plants import grad_sync


def summed(wrapped, instance, args, kwargs):
    for bucket in instance.buckets:
        bucket.gradient_scaling_factor = 1.0
    return wrapped(*args, **kwargs)


CASE = case(
    "B129",
    "https://github.com/pytorch/pytorch/issues/162344",
    healthy=DISTOPT,
    reference=FOUR,
    patches=(grad_sync(summed, "Gloo's reduce_scatter took AVG for SUM"),),
    answers=(
        by_compare(0, "reduce", "*", "reduce.scaled", roles="reduced_grad", says="2"),
        by_check(0, "reduce", "*", "reduce.not_the_sum"),
    ),
)
