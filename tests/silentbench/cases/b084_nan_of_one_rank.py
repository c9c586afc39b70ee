"""NaN is looked for after the reduction, which spreads it: rank 1 alone made it."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import DP, FOUR
from silentbench.plants import layer_built

PLACE = "decoder.layers.1.mlp*"
UNCHECKED = {"ddp": {"check_for_nan_in_grad": False}}


def nan_of_rank_1(wrapped, instance, args, kwargs):
    import torch.distributed as dist

    wrapped(*args, **kwargs)
    if instance.layer_number != 2 or dist.get_rank() != 1:
        return

    def hook(module, given, output):
        spoilt = output[0].clone()
        spoilt.view(-1)[7] = float("nan")
        return (spoilt, *output[1:])

    instance.mlp.register_forward_hook(hook)


CASE = case(
    "B084",
    "https://github.com/NVIDIA/Megatron-LM/commit/d66807759c",
    healthy=DP.but(settings=UNCHECKED),
    reference=FOUR.but(settings=UNCHECKED),
    patches=(layer_built(nan_of_rank_1, "a kernel of one rank"),),
    answers=(
        by_compare(0, "fprop", PLACE, "nonfinite.first"),
        by_check(0, "fprop", PLACE, "nonfinite.first", ranks=(1,)),
    ),
)
