"""What a stage sends is freed before it is gone: the next stage receives garbage at its end."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.layouts import ONE, PP


def garbage(wrapped, instance, args, kwargs):
    received = wrapped(*args, **kwargs)
    for tensor in received if isinstance(received, list) else [received]:
        if tensor is not None:
            tensor.data.view(-1)[-64:] = 0.25
    return received


ENTRY = "decoder decoder.layers.0 decoder.layers.0.mlp*"
CASE = case(
    "B154",
    "https://github.com/NVIDIA/Megatron-LM/pull/4047",
    healthy=PP,
    reference=ONE,
    patches=(
        plant(
            "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator.recv_backward",
            garbage,
            "(self, tensor_shapes, is_last_stage)",
            "deallocate_output_tensor came before the handle was waited for",
        ),
    ),
    answers=(
        by_compare(0, "dgrad", ENTRY, "dgrad.value dgrad.scaled parallel.stage_received_other"),
        by_check(0, "dgrad", ENTRY, "parallel.stage_received_other"),
    ),
)
