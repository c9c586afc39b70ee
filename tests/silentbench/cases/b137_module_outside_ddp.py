"""One module is outside of DistributedDataParallel: its gradients stay each rank's own."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import DP, FOUR
from silentbench.plants import grad_sync, layer_built

PLACE = "decoder.layers.1.mlp.linear_fc1.*"


def marked(wrapped, instance, args, kwargs):
    wrapped(*args, **kwargs)
    if instance.layer_number == 2:
        for parameter in instance.mlp.linear_fc1.parameters():
            parameter.outside = True


def left_out(wrapped, instance, args, kwargs):
    outside = [p for p in instance.params if getattr(p, "outside", False)]
    own = [p.main_grad * instance.buckets[0].gradient_scaling_factor for p in outside]
    result = wrapped(*args, **kwargs)
    for parameter, grad in zip(outside, own, strict=True):
        parameter.main_grad.copy_(grad)
    return result


OUTSIDE = (
    layer_built(marked, "the module was wrapped on some condition"),
    grad_sync(left_out, "its hooks were skipped"),
)

CASE = case(
    "B137",
    "TrainCheck: pytorch-115607, pytorch-104336, DDP-out-of-sync",
    healthy=DP,
    reference=FOUR,
    patches=OUTSIDE,
    answers=(
        by_compare(
            0,
            "reduce",
            PLACE,
            "parallel.replicas_differ reduce.value reduce.scaled reduce.own_fault",
            roles="reduced_grad",
        ),
        by_check(0, "reduce", PLACE, "parallel.replicas_differ reduce.not_the_sum"),
    ),
)
