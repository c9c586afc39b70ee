"""The all-reduce of a non-contiguous gradient is thrown away.

``_reduce`` reduces a copy and returns the original.

A fused head of the language model (copy to the group, transpose, multiply) hands it a transposed gradient.
Only with tensor parallelism, without sequence parallelism, and with more than one sample per microbatch. No
line of Megatron is changed: the fault is in the version that is trained here.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE, TP
from silentbench.plants import model_built


def transposed_head(wrapped, instance, args, kwargs):
    _head(wrapped, instance, args, kwargs, contiguous=False)


def contiguous_head(wrapped, instance, args, kwargs):
    _head(wrapped, instance, args, kwargs, contiguous=True)


def _head(wrapped, instance, args, kwargs, *, contiguous):
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region as copy

    wrapped(*args, **kwargs)

    def forward(hidden, weight=None, runtime_gather_output=None):
        # [s, b, h] to [b, s, v / tp] and back
        moved = copy(hidden.transpose(0, 1).contiguous()) if contiguous else copy(hidden).transpose(0, 1)
        return moved.matmul(weight.t()).transpose(0, 1).contiguous(), None

    if hasattr(instance, "output_layer"):
        instance.output_layer.forward = forward


WHY = "a fused head of the language model"
CASE = case(
    "B001",
    "https://github.com/NVIDIA/Megatron-LM/issues/5337",
    "https://github.com/NVIDIA/Megatron-LM/pull/5338",
    "https://github.com/NVIDIA/Megatron-LM/commit/60f338a9cd",
    "https://github.com/NovaSky-AI/SkyRL/pull/1886",
    healthy=TP.but(patches=(model_built(contiguous_head, WHY),)),
    faulty=TP.but(patches=(model_built(transposed_head, WHY),)),
    reference=ONE.but(patches=(model_built(contiguous_head, WHY),)),
    answers=(
        by_compare(
            0,
            "dgrad",
            "output_layer decoder.final_layernorm",
            "layout.collective_operand reduce.result_discarded parallel.replicas_differ",
        ),
        by_check(
            0,
            "dgrad",
            "output_layer decoder.final_layernorm *copy_to_tensor*",
            "layout.collective_operand reduce.result_discarded parallel.replicas_differ",
        ),
    ),
)
