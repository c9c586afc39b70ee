"""The gradient buffer of one rank is not clean when the training begins: it was made on another stream."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.layouts import DP, FOUR


def dirty(wrapped, instance, args, kwargs):
    import torch.distributed as dist

    wrapped(*args, **kwargs)
    if dist.get_rank() == 1 and not hasattr(instance, "begun"):
        instance.begun = True
        instance.buffers[0].grad_data[1000:1100] = 0.5


CASE = case(
    "B153",
    "https://github.com/NVIDIA/Megatron-LM/issues/2301",
    "https://github.com/NVIDIA/Megatron-LM/issues/6018",
    healthy=DP,
    reference=FOUR,
    patches=(
        plant(
            "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.zero_grad_buffer",
            dirty,
            "(self)",
            "the stream was not waited for",
        ),
    ),
    answers=(
        by_compare(0, "accumulate", "*", "wgrad.stale_main_grad", roles="main_grad"),
        by_check(0, "accumulate", "*", "accumulate.not_zero_at_start", ranks=(1,)),
    ),
)
