"""The gradient is not averaged over data-parallel ranks: the bucket's scaling factor leaves their number out.

Every gradient is twice what it should be; clipping and Adam hide it from the loss forever.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import DP, FOUR
from silentbench.plants import grad_sync


def unscaled(wrapped, instance, args, kwargs):
    for bucket in instance.buckets:
        bucket.gradient_scaling_factor = 1.0
    return wrapped(*args, **kwargs)


CASE = case(
    "B011",
    "https://github.com/NVIDIA/Megatron-LM/commit/3bdcbbbe5d",
    "https://github.com/NVIDIA/Megatron-LM/issues/906",
    "https://github.com/NVIDIA/Megatron-LM/issues/673",
    "https://gitcode.com/Ascend/MindSpeed-Core-MS commit d6b26ef",
    "https://gitcode.com/Ascend/MindSpeed-LLM commit 6082e0de",
    healthy=DP,
    reference=FOUR,
    patches=(grad_sync(unscaled, "gradient_scaling_factor without the data-parallel size"),),
    answers=(
        by_compare(0, "reduce", "*", "reduce.scaled", roles="reduced_grad", says="2"),
        by_check(0, "reduce", "*", "reduce.not_the_sum"),
    ),
    quick=True,
)
