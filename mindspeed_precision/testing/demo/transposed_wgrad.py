"""Megatron's parallel linear with a dW of the same values in another layout: ``[out, in]`` of strides (1, out).

Run as a script, ``transposed_wgrad.py SCRIPT ARGS…`` runs SCRIPT with it. The one difference to Megatron's own
backward is the order of the product::

    Megatron            dW = grad_output.t() @ input         contiguous
    here                dW = (input.t() @ grad_output).t()   a transposed view

Both are right. What adds it to ``.grad`` without minding strides is not: MindSpore 2.7.1 to 2.10.0 on a CPU.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any


def transposed(backward: Any) -> Any:
    """Return a backward of the linear that returns ``backward``'s gradients with a transposed view as dW.

    Args:
        backward: Megatron's ``backward(ctx, grad_output)``; dW is the second of what it returns.
    """

    def backward_with_view(ctx: Any, grad_output: Any) -> tuple[Any, ...]:
        grad_input, grad_weight, *others = backward(ctx, grad_output)
        if grad_weight is None or ctx.gradient_accumulation_fusion or ctx.sequence_parallel:
            return (grad_input, grad_weight, *others)
        layer_input = ctx.saved_tensors[0]
        flat_input = layer_input.reshape(-1, layer_input.shape[-1])
        flat_grad = grad_output.reshape(-1, grad_output.shape[-1])
        return (grad_input, flat_input.t().matmul(flat_grad).t(), *others)

    return backward_with_view


def install() -> None:
    """Give Megatron's parallel linears this backward; before `mindspeed_precision` observes them."""
    from megatron.core.tensor_parallel import layers

    linear = layers.LinearWithGradAccumulationAndAsyncCommunication
    linear.backward = staticmethod(transposed(linear.backward))


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    install()
    runpy.run_path(sys.argv[0], run_name="__main__")
