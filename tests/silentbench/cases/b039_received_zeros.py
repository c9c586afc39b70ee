"""What a pipeline stage receives has zeros in it: the transfer loses every hundredth element."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.layouts import ONE, PP


def with_holes(wrapped, instance, args, kwargs):
    received = wrapped(*args, **kwargs)
    for tensor in received if isinstance(received, list) else [received]:
        if tensor is not None:
            tensor.data.view(-1)[::100] = 0
    return received


CASE = case(
    "B039",
    "https://github.com/pytorch/pytorch/issues/84803",
    "https://github.com/pytorch/pytorch/issues/96600",
    healthy=PP,
    reference=ONE,
    patches=(
        plant(
            "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator.recv_forward",
            with_holes,
            "(self, tensor_shapes, is_first_stage)",
            "the driver's transfer was corrupt",
        ),
    ),
    answers=(
        by_compare(
            0,
            "fprop",
            "decoder decoder.layers.1 decoder.layers.1.input_layernorm",
            "fprop.value parallel.stage_received_other",
        ),
        by_check(
            0,
            "fprop",
            "decoder decoder.layers.1 decoder.layers.1.input_layernorm",
            "parallel.stage_received_other",
        ),
    ),
)
