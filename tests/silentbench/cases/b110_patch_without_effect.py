"""A patch replaces a function in a module whose name is also a function's: nothing calls what it has set.

Here the sum of the norms' gradients over the tensor-parallel group, which the framework meant to bring along.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.cases.b008_sp_norm_not_reduced import unmarked
from silentbench.layouts import ONE, SP
from silentbench.plants import layer_built

PLACE = "decoder.layers.*layernorm.*"


def brought_along(wrapped, instance, args, kwargs):
    import torch.distributed as dist
    from megatron.core import parallel_state

    result = wrapped(*args, **kwargs)
    for chunk in args[0]:
        for name, parameter in chunk.module.named_parameters():
            if name.endswith("layernorm.weight") and ".layers." in name:
                dist.all_reduce(parameter.main_grad, group=parallel_state.get_tensor_model_parallel_group())
    return result


def set_on_the_function(wrapped, instance, args, kwargs):
    from megatron.core.distributed import finalize_model_grads  # the function, not the module

    finalize_model_grads._allreduce_non_tensor_model_parallel_grads = brought_along
    return wrapped(*args, **kwargs)


FINALIZE = "megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads"
SIGNATURE = "(model, config, tp_group)"
UNMARKED = layer_built(unmarked, "the framework's own norm is not marked")

CASE = case(
    "B110",
    "https://gitcode.com/Ascend/MindSpeed-LLM commit 971be141 (MR !2818)",
    healthy=SP.but(
        patches=(UNMARKED, plant(FINALIZE, brought_along, SIGNATURE, "the patch, where it is called"))
    ),
    faulty=SP.but(
        patches=(UNMARKED, plant(FINALIZE, set_on_the_function, SIGNATURE, "the patch, set elsewhere"))
    ),
    reference=ONE,
    answers=(
        by_compare(0, "reduce", PLACE, "parallel.replicas_differ", roles="reduced_grad"),
        by_check(0, "reduce", PLACE, "parallel.replicas_differ"),
    ),
)
