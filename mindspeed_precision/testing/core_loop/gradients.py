"""Gradients without a DDP wrapper: accumulated in ``.grad``, averaged after the last microbatch."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state


def finalize_model_grads(model: list[Any], num_tokens: Any = None, **_: Any) -> None:
    """Average ``.grad`` over the data-parallel ranks; nothing to do for one rank.

    Takes the place of ``megatron.core.distributed.finalize_model_grads``, which needs DDP's buffers. Without
    pipeline and sequence parallelism the data-parallel reduction is all that it would do.

    Args:
        model: this rank's chunks.
        num_tokens: given when the loss is per token, which this loop refuses.

    Raises:
        NotImplementedError: ``num_tokens`` is given.
    """
    if num_tokens is not None:
        raise NotImplementedError("the core loop does not divide gradients by tokens")
    ranks = parallel_state.get_data_parallel_world_size()
    if ranks == 1:
        return
    group = parallel_state.get_data_parallel_group()
    for chunk in model:
        for parameter in chunk.parameters():
            if parameter.grad is not None:
                total = parameter.grad.contiguous()
                torch.distributed.all_reduce(total, group=group)
                parameter.grad = total / ranks


def parameter_groups(model: list[Any]) -> list[dict[str, Any]]:
    """Return Megatron's two groups: with weight decay, and without it (biases and norms)."""
    groups: dict[float, list[Any]] = {}
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad:
                decays = 0.0 if name.endswith(".bias") or len(parameter.shape) == 1 else 1.0
                groups.setdefault(decays, []).append(parameter)
    return [
        {
            "params": parameters,
            "wd_mult": decays,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
        }
        for decays, parameters in groups.items()
    ]
