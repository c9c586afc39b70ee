"""Megatron stops: NaN in the local gradient norm of a bucket. Which tensor, on which rank.

It does not say.
"""

from __future__ import annotations

from silentbench.answers import by_check
from silentbench.case import case
from silentbench.layouts import DP
from silentbench.plants import attention


def nan_of_rank_1(wrapped, instance, args, kwargs):
    import torch.distributed as dist

    query, *rest = args
    if dist.get_rank() == 1 and instance.layer_number == 1:
        query = query.view_as(query)
        query.register_hook(lambda grad: grad * float("nan"))
    return wrapped(query, *rest, **kwargs)


CASE = case(
    "B165",
    "https://github.com/modelscope/ms-swift/issues/9791",
    healthy=DP,
    faulty=DP.but(raises="NaN"),
    patches=(attention(nan_of_rank_1, "a backward kernel"),),
    answers=(by_check(0, "dgrad", "decoder.layers.0.self_attention*", "nonfinite.first", ranks=(1,)),),
)
