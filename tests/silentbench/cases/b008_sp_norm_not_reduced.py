"""Sequence parallelism: the gradient of the norms' weights is not summed over the tensor-parallel group.

The weight was not marked ``sequence_parallel``, so that ``finalize_model_grads`` skips it. The loss looks
normal for thousands of steps while the ranks' copies drift apart.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE, SP
from silentbench.plants import layer_built


def unmarked(wrapped, instance, args, kwargs):
    wrapped(*args, **kwargs)
    for norm in (instance.input_layernorm, instance.pre_mlp_layernorm):
        norm.weight.sequence_parallel = False


CASE = case(
    "B008",
    "https://github.com/NVIDIA/Megatron-LM/commit/20b7a5489d",
    "https://gitcode.com/Ascend/MindSpeed-Core-MS commit fb5b9a4 (MR !234)",
    "https://github.com/bigscience-workshop/Megatron-DeepSpeed/issues/271",
    "https://github.com/NVIDIA/Megatron-LM/issues/1446",
    "https://github.com/NVIDIA/apex/issues/1686",
    healthy=SP,
    reference=ONE,
    patches=(layer_built(unmarked, "the norm's weight was not marked sequence_parallel"),),
    answers=(
        by_compare(
            0,
            "reduce",
            "decoder.layers.*layernorm.*",
            "parallel.replicas_differ",
            roles="reduced_grad",
        ),
        by_check(0, "reduce", "decoder.layers.*layernorm.*", "parallel.replicas_differ"),
    ),
    quick=True,
)
