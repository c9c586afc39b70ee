"""Fewer groups of keys and values than ranks: they are gathered, and their gradient is not summed."""

from __future__ import annotations

from silentbench.answers import by_compare
from silentbench.case import case, plant
from silentbench.layouts import ONE, TP

SHARED = {"kv_groups": 1}


def own_part(wrapped, instance, args, kwargs):
    import torch.distributed as dist

    grad = args[1]
    return (grad.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()].contiguous(), None)


CASE = case(
    "B118",
    "https://github.com/bigcode-project/Megatron-LM/issues/35",
    "https://github.com/bigcode-project/Megatron-LM/issues/37",
    healthy=TP.but(settings=SHARED),
    reference=ONE.but(settings=SHARED),
    patches=(
        plant(
            "megatron.core.tensor_parallel.mappings:_AllGatherFromTensorParallelRegion.backward",
            own_part,
            "(ctx, grad_output)",
            "no reduction over the ranks that share a group",
        ),
    ),
    answers=(
        by_compare(
            0,
            "dgrad wgrad",
            "decoder.layers.1.self_attention*",
            "dgrad.value dgrad.scaled wgrad.value wgrad.after_gemm wgrad.operand_value "
            "wgrad.own_fault wgrad.scaled",
        ),
    ),
)
