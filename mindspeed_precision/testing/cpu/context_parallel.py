"""Attention over a context-parallel group, for the local ``DotProductAttention``."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.distributed as dist


class _GatherSequence(torch.autograd.Function):
    """Concatenate ``[s/cp, ...]`` over the group to ``[s, ...]``; the gradient is summed and split again."""

    @staticmethod
    def forward(ctx: Any, shard: Any, group: Any) -> Any:
        ctx.group = group
        shards = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
        dist.all_gather(shards, shard.contiguous(), group=group)
        return torch.cat(shards, dim=0)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group), dim=0)[dist.get_rank(ctx.group)].contiguous(), None


def zigzag_positions(rank: int, size: int, *, length: int) -> Any:
    """Return the positions ``[length]`` (int64) in the sequence that ``rank`` of ``size`` holds.

    Megatron cuts the sequence into ``2 * size`` chunks and gives a rank the chunk of its number and the one
    as far from the end, so that causal attention is balanced (megatron.core.utils.get_batch_on_this_cp_rank).
    """
    chunk = length // 2
    offsets = torch.arange(chunk)
    return torch.cat([offsets + rank * chunk, offsets + (2 * size - 1 - rank) * chunk])


def causal_mask(rank: int, size: int, *, length: int) -> Any:
    """Return the mask ``[1, 1, length, size * length]``, True where a query of ``rank`` may not look."""
    keys = torch.cat([zigzag_positions(other, size, length=length) for other in range(size)])
    queries = zigzag_positions(rank, size, length=length)
    return (keys[None, :] > queries[:, None])[None, None]


def attend_over_context_parallel_group(module: Any) -> None:
    """Let ``DotProductAttention`` of ``module`` attend over a whole context-parallel group."""
    attention_class = module.DotProductAttention
    original_init, original_forward = attention_class.__init__, attention_class.forward

    @functools.wraps(original_init)
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        whole = copy.copy(config)
        whole.context_parallel_size = 1
        original_init(self, whole, *args, **kwargs)
        self.config = config

    @functools.wraps(original_forward)
    def forward(
        self: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        size = self.config.context_parallel_size
        if size > 1:
            from megatron.core import parallel_state

            group = parallel_state.get_context_parallel_group()
            attention_mask = causal_mask(dist.get_rank(group), size, length=query.size(0))
            key, value = _GatherSequence.apply(key, group), _GatherSequence.apply(value, group)
        return original_forward(self, query, key, value, attention_mask, *args, **kwargs)

    attention_class.__init__, attention_class.forward = init, forward
