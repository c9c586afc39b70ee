"""The other backend of the demo: Megatron's parallel linear as the MindSpore side computes its dW.

Run as a script, ``other_backend.py SCRIPT ARGS…`` runs SCRIPT with it. The one difference to Megatron's own
backward is that the transposed gradient is copied before the product::

    Megatron on PTA     dW = grad_output.t() @ input
    here                dW = grad_output.t().contiguous() @ input

It stands in for a second framework, which this machine may not have; it is not MindSpore.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import torch


def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of one parallel linear: input ``[…, in]``, weight ``[out, in]``, bias ``[out]``.

    Without gradient accumulation fusion and without sequence parallelism, which the demo does not use.

    Raises:
        NotImplementedError: it is used with one of them.
    """
    if ctx.gradient_accumulation_fusion or ctx.sequence_parallel:
        raise NotImplementedError("the demo's other backend knows no fusion and no sequence parallelism")
    layer_input, weight = ctx.saved_tensors
    grad_input = grad_output.matmul(weight)
    if ctx.allreduce_dgrad:
        torch.distributed.all_reduce(grad_input, group=_tensor_parallel_group(ctx))
    flat_grad = grad_output.reshape(-1, grad_output.shape[-1])
    flat_input = layer_input.reshape(-1, layer_input.shape[-1])
    grad_weight = flat_grad.t().contiguous().matmul(flat_input)
    grad_bias = flat_grad.sum(dim=0) if ctx.use_bias else None
    unused = len(ctx.needs_input_grad) - 3
    return (grad_input, grad_weight, grad_bias, *([None] * unused))


def _tensor_parallel_group(ctx: Any) -> Any:
    from megatron.core import parallel_state

    return getattr(ctx, "tp_group", None) or parallel_state.get_tensor_model_parallel_group()


def install() -> None:
    """Give Megatron's parallel linears this backward; before `mindspeed_precision` observes them."""
    from megatron.core.tensor_parallel import layers

    layers.LinearWithGradAccumulationAndAsyncCommunication.backward = staticmethod(backward)


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    install()
    runpy.run_path(sys.argv[0], run_name="__main__")
