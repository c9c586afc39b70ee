"""Megatron's parallel linear with a dW of the same values in another layout: a transposed view.

Run as a script, ``transposed_wgrad.py SCRIPT ARGS…`` runs SCRIPT with it. The one difference to Megatron's
own backward is how dW lies in memory::

    Megatron            dW                          strides (in, 1)
    here                dW.t().contiguous().t()     a transposed view, bit for bit the same

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
        return (grad_input, grad_weight.t().contiguous().t(), *others)

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
