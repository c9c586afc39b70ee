"""Megatron's vocabulary-parallel cross entropy without a write in place.

The formulas are those of ``megatron.core.tensor_parallel.cross_entropy``: with ``x`` the logits less their
maximum over the whole vocabulary, ``loss = log Σ exp(x) - x[target]`` and
``d loss / d x = exp(x) / Σ exp(x) - onehot(target)``, the target counted by the rank that has its part.
"""

from __future__ import annotations

from typing import Any

import torch


def predicted_logits(
    vocab_parallel_logits: Any, target: Any, logits_max: Any, vocab_start_index: int, vocab_end_index: int
) -> tuple[Any, Any, Any, Any, Any]:
    """Return ``(target_mask, masked_target_1d, predicted_logits, sum_exp_logits, exp_logits)``.

    Args:
        vocab_parallel_logits: ``[s, b, v]`` float32, this rank's part of the vocabulary.
        target: ``[s, b]`` int64.
        logits_max: ``[s, b]`` float32, over the whole vocabulary.
        vocab_start_index: of this rank's part.
        vocab_end_index: one past it.

    Returns:
        mask ``[s, b]``, True where another rank has the target; targets ``[s * b]`` in this rank's part, 0
        where masked; the target's logit ``[s, b]``, 0 where masked; ``[s, b]``; ``[s, b, v]``.
    """
    shifted = vocab_parallel_logits - logits_max.unsqueeze(dim=-1)
    elsewhere = (target < vocab_start_index) | (target >= vocab_end_index)
    own_target = (target - vocab_start_index).masked_fill(elsewhere, 0).view(-1)
    flat = shifted.view(-1, shifted.shape[-1])
    predicted = torch.gather(flat, 1, own_target.unsqueeze(-1)).view(*target.shape)
    exponentials = torch.exp(shifted)
    return (
        elsewhere,
        own_target,
        predicted.masked_fill(elsewhere, 0.0),
        exponentials.sum(dim=-1),
        exponentials,
    )


def cross_entropy_loss(exp_logits: Any, predicted_logits: Any, sum_exp_logits: Any) -> tuple[Any, Any]:
    """Return the softmax ``[s, b, v]`` and the loss ``[s, b]``."""
    loss = torch.log(sum_exp_logits) - predicted_logits
    return exp_logits / sum_exp_logits.unsqueeze(dim=-1), loss


def gradients(
    grad_2d: Any,
    arange_1d: Any,
    masked_target_1d: Any,
    softmax_update: Any,
    grad_input: Any,
    grad_output: Any,
) -> Any:
    """Return the gradient of the logits, ``[s, b, v]``.

    Args:
        grad_2d: the softmax, ``[s * b, v]``.
        arange_1d: not used: it names rows to write to.
        masked_target_1d: ``[s * b]`` int64.
        softmax_update: ``[s * b]`` float32, 1 where this rank has the target.
        grad_input: the softmax, ``[s, b, v]``.
        grad_output: ``[s, b]``.
    """
    columns = torch.arange(grad_2d.shape[-1])[None, :]
    own = (columns == masked_target_1d[:, None]).float() * softmax_update[:, None]
    return (grad_2d - own).view(*grad_input.shape) * grad_output.unsqueeze(dim=-1)


def replace(module: Any) -> None:
    """Give ``VocabParallelCrossEntropy`` of ``module`` these three functions."""
    target = module.VocabParallelCrossEntropy
    target.calculate_predicted_logits = staticmethod(predicted_logits)
    target.calculate_cross_entropy_loss = staticmethod(cross_entropy_loss)
    target.calculate_gradients = staticmethod(gradients)
