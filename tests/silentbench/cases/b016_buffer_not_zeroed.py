"""The gradient buffer is not zeroed between steps: each step's gradient has those of all before it added."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.layouts import ONE


def nothing(wrapped, instance, args, kwargs):
    for parameter in instance.params_with_grad:  # all but the zeroing of the buffers
        parameter.grad_added_to_main_grad = False


CASE = case(
    "B016",
    "https://github.com/NVIDIA/Megatron-LM/commit/b25a76e000",
    "https://github.com/NVIDIA/Megatron-LM/pull/4609",
    "https://stackoverflow.com/questions/60335387 (TrainCheck case)",
    healthy=ONE,
    patches=(
        plant(
            "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.zero_grad_buffer",
            nothing,
            "(self)",
            "zero_grad was left out, or something else wrote into the shared buffer",
        ),
    ),
    answers=(
        by_compare(1, "accumulate", "*", "wgrad.stale_main_grad", roles="main_grad"),
        by_check(1, "accumulate", "*", "accumulate.not_zero_at_start"),
    ),
    quick=True,
)
