"""What gloo does otherwise than NCCL and HCCL."""

from __future__ import annotations

import atexit
import functools
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_precision.testing.piece import Piece

# More sends than a pipeline schedule has in flight: an older one has been received.
SENDS_KEPT = 256
_sends: deque[tuple[Any, Any]] = deque(maxlen=SENDS_KEPT)


def _replace(name: str, function: Any) -> None:
    # P2POp compares with the name in distributed_c10d by identity, so both get the same object
    setattr(dist, name, function)
    setattr(dist.distributed_c10d, name, function)


def _always_gloo() -> None:
    original_init, original_group, original_barrier = dist.init_process_group, dist.new_group, dist.barrier

    @functools.wraps(original_init)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        return original_init("gloo", *args, **kwargs)

    @functools.wraps(original_group)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        if "nccl" in str(kwargs.get("backend") or ""):
            kwargs["backend"] = "gloo"
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        return original_group(*args, **kwargs)

    @functools.wraps(original_barrier)
    def barrier(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_ids", None)
        return original_barrier(*args, **kwargs)

    _replace("init_process_group", init_process_group)
    _replace("new_group", new_group)
    _replace("barrier", barrier)


def _send_an_alias() -> None:
    original = dist.isend

    @functools.wraps(original)
    def isend(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        alias = tensor.detach()
        work = original(alias, *args, **kwargs)
        _sends.append((work, alias))
        return work

    _replace("isend", isend)


def _split_by_lists() -> None:
    original = dist.all_to_all_single

    def as_list(sizes: Any) -> Any:
        return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

    @functools.wraps(original)
    def all_to_all_single(
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return original(
            output, input, as_list(output_split_sizes), as_list(input_split_sizes), *args, **kwargs
        )

    _replace("all_to_all_single", all_to_all_single)


def _uneven_shards() -> None:
    original_gather, original_scatter = dist.all_gather, dist.reduce_scatter

    def even(tensors: Any) -> bool:
        return len({tensor.shape for tensor in tensors}) == 1

    def owners(group: Any, tensors: Any) -> Any:
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        return zip(ranks, tensors, strict=True)

    @functools.wraps(original_gather)
    def all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        if async_op or even(tensor_list):
            return original_gather(tensor_list, tensor, group=group, async_op=async_op)
        for owner, received in owners(group, tensor_list):
            buffer = tensor.contiguous() if owner == dist.get_rank() else torch.empty_like(received)
            dist.broadcast(buffer, src=owner, group=group)
            received.copy_(buffer)
        return None

    @functools.wraps(original_scatter)
    def reduce_scatter(
        output: Any, input_list: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if async_op or even(input_list):
            return original_scatter(output, input_list, op=op, group=group, async_op=async_op)
        for owner, shard in owners(group, input_list):
            buffer = shard.contiguous().clone()
            dist.all_reduce(buffer, op=op, group=group)
            if owner == dist.get_rank():
                output.copy_(buffer)
        return None

    _replace("all_gather", all_gather)
    _replace("reduce_scatter", reduce_scatter)


def _destroy_process_group() -> None:
    if dist.is_available() and dist.is_initialized():
        _sends.clear()
        dist.destroy_process_group()


def _destroy_at_exit() -> None:
    atexit.register(_destroy_process_group)


PIECES = (
    Piece(
        name="gloo_backend",
        why="A script that does not pass --distributed-backend gloo asks for nccl, with its options and "
        "device ids.",
        error_without="RuntimeError: Distributed package doesn't have NCCL built in",
        when="scripts that leave --distributed-backend at nccl",
        apply=_always_gloo,
    ),
    Piece(
        name="send_alias",
        why="deallocate_output_tensor swaps the storage of an activation that was just sent. NCCL and "
        "HCCL are ordered by the stream; gloo sends from host memory in the background, from freed "
        "memory then. An alias is sent, which keeps the storage alive.",
        error_without="silent: NaN or wrong numbers, different in each run",
        when="VPP with overlapped p2p communication",
        apply=_send_an_alias,
    ),
    Piece(
        name="split_lists",
        why="The MoE alltoall dispatcher turns split sizes into lists only when they are CUDA tensors.",
        error_without="TypeError: all_to_all_single(): incompatible function arguments",
        when="MoE with the alltoall dispatcher",
        apply=_split_by_lists,
    ),
    Piece(
        name="uneven_shards",
        why="NCCL and HCCL gather and scatter shards of unequal sizes, gloo does not: one broadcast or "
        "all_reduce each.",
        error_without="RuntimeError: gloo allgather: invalid tensor size",
        when="MoE with expert tensor parallelism > 1",
        apply=_uneven_shards,
    ),
    Piece(
        name="process_group_teardown",
        why="gloo's threads must be gone before the interpreter is: the process group is destroyed at exit.",
        error_without="now and then: terminate called without an active exception, SIGABRT after a good run",
        when="every run",
        optional=True,
        apply=_destroy_at_exit,
    ),
)
