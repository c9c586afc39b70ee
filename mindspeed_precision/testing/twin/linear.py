"""Megatron's parallel linears for one rank, with their weight gradient computed as Megatron computes it."""

from __future__ import annotations

from typing import Any

from mindspore import Parameter, Tensor, mint, nn
from mindspore.common._grad_function import _Function


class LinearWithGradAccumulationAndAsyncCommunication(_Function):
    """``y = x Wᵀ + b``; shapes: x ``[s, b, in]``, W ``[out, in]``, b ``[out]``, y ``[s, b, out]``.

    The products are those of Megatron's function of the same name: ``dX = dY W`` and
    ``dW = dYᵀ X`` over the flattened ``[s·b, …]`` operands.
    """

    @staticmethod
    def forward(
        ctx: Any, layer_input: Tensor, weight: Tensor, bias: Tensor | None, transposed_wgrad: bool
    ) -> Tensor:
        """Return ``y``."""
        ctx.save_for_backward(layer_input, weight)
        ctx.use_bias = bias is not None
        ctx.transposed_wgrad = transposed_wgrad
        output = mint.matmul(layer_input, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return dX, dW, the bias's gradient or None, and None for the flag."""
        layer_input, weight = ctx.saved_tensors
        grad_input = mint.matmul(grad_output, weight)
        flat_grad = grad_output.contiguous().reshape(-1, grad_output.shape[-1])
        flat_input = layer_input.contiguous().reshape(-1, layer_input.shape[-1])
        grad_weight = mint.matmul(flat_grad.t(), flat_input)
        if ctx.transposed_wgrad:
            grad_weight = grad_weight.t().contiguous().t()  # the same bits, stride (1, out)
        grad_bias = mint.sum(flat_grad, dim=0) if ctx.use_bias else None
        return grad_input, grad_weight, grad_bias, None


class ColumnParallelLinear(nn.Cell):
    """Megatron's linear whose outputs are split over ranks; here for one rank.

    Args:
        input_size: features of the input.
        output_size: features of the output.
        bias: whether there is one.
        skip_bias_add: return the bias beside an output without it.
        own_weight: False when every call is given the weight (an output layer tied to the embedding).
        transposed_wgrad: return dW as a transposed view, bits unchanged.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool = True,
        skip_bias_add: bool = False,
        own_weight: bool = True,
        transposed_wgrad: bool = False,
    ) -> None:
        super().__init__()
        self.weight = Parameter(mint.zeros((output_size, input_size)), name="weight") if own_weight else None
        self.bias = Parameter(mint.zeros((output_size,)), name="bias") if bias else None
        self.skip_bias_add = skip_bias_add
        self.transposed_wgrad = transposed_wgrad

    def construct(self, layer_input: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the output ``[s, b, out]``, and the bias where the caller is to add it."""
        added = None if self.skip_bias_add else self.bias
        output = LinearWithGradAccumulationAndAsyncCommunication.apply(
            layer_input, self.weight if weight is None else weight, added, self.transposed_wgrad
        )
        return output, self.bias if self.skip_bias_add else None


class RowParallelLinear(ColumnParallelLinear):
    """Megatron's linear whose inputs are split over ranks; on one rank it is the other one."""
