"""Megatron's vocab-parallel cross entropy for one rank, written without in-place operations.

Megatron's own works in place (``logits -= max``, ``exp_logits.div_``, ``grad_2d[i, target] -= 1``), which
MindSpore's CPU backend silently does not do (``defects.in_place_lost``).
"""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, dtype, mint, ops
from mindspore.common._grad_function import _Function


class _VocabParallelCrossEntropy(_Function):
    """``loss = log Σ exp(logits) − logits[target]`` per token; named like Megatron's."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss ``[s, b]`` of logits ``[s, b, v]`` and targets ``[s, b]``."""
        shifted = logits - mint.max(logits, dim=-1)[0].unsqueeze(-1)
        target_1d = target.reshape(-1)
        flat = shifted.reshape(-1, shifted.shape[-1])
        predicted = mint.gather(flat, 1, target_1d.unsqueeze(-1)).reshape(target.shape)
        exponentials = mint.exp(shifted)
        total = mint.sum(exponentials, dim=-1)
        ctx.save_for_backward(exponentials / total.unsqueeze(-1), target_1d)
        return mint.log(total) - predicted

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        """Return ``(softmax − one_hot(target)) · grad_output``, and None for the targets."""
        softmax, target_1d = ctx.saved_tensors
        one, zero = Tensor(1.0, dtype.float32), Tensor(0.0, dtype.float32)
        expected = ops.one_hot(target_1d, softmax.shape[-1], one, zero, -1).reshape(softmax.shape)
        return (softmax - expected) * grad_output.unsqueeze(-1), None


def vocab_parallel_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the loss per token, ``[s, b]``, of float32 logits ``[s, b, v]`` and int64 targets ``[s, b]``."""
    return _VocabParallelCrossEntropy.apply(logits, target)
