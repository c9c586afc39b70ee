"""Two faults at once: the mask of the first layer is dropped, and gradients of the last stage are halved."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE, PP
from silentbench.plants import attention, grad_sync


def without_mask(wrapped, instance, args, kwargs):
    query, key, value, mask, *rest = args
    if instance.layer_number == 1:
        mask = mask & False
    return wrapped(query, key, value, mask, *rest, **kwargs)


def halved(wrapped, instance, args, kwargs):
    import torch.distributed as dist

    if dist.get_rank() == 1:
        for bucket in instance.buckets:
            bucket.grad_data *= 0.5
    return wrapped(*args, **kwargs)


CASE = case(
    "B145",
    "https://github.com/mindspore-ai/hyper-parallel/issues/244",
    healthy=PP,
    reference=ONE,
    patches=(
        attention(without_mask, "a gate on its shape"),
        grad_sync(halved, "sharding of the root module"),
    ),
    answers=(
        by_compare(0, "fprop", "decoder.layers.0.self_attention.core_attention*", "fprop.value"),
        by_check(0, "fprop", "decoder.layers.0.self_attention.core_attention", "fprop.not_of_its_inputs"),
        by_check(0, "reduce", "*", "reduce.not_the_sum"),
    ),
)
