"""``torch.distributed`` over MindSpore's collectives on a CPU (``mccl``).

They add (``AllReduce`` of float32 and float16), gather and broadcast. They do not take a maximum, scatter
what they reduced, or send and receive; a group of one hangs. What a group of one does is nothing, so it is
not asked.
"""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from mindspeed_precision.testing.mindtorch.piece import CompatPiece, Mends, load

RANK, SIZE = "RANK_ID", "RANK_SIZE"
"""What msrun sets; without it the process is alone."""


class Group:
    """A process group.

    Args:
        ranks: of the whole world, in order.
        name: MindSpore's name of it; empty for a group of one, or for one without this process.
    """

    def __init__(self, ranks: Sequence[int], name: str) -> None:
        self.ranks = tuple(ranks)
        self.name = name

    def size(self) -> int:
        """Return how many ranks it has."""
        return len(self.ranks)

    def rank(self) -> int:
        """Return this process's place in it, -1 outside."""
        return self.ranks.index(own_rank()) if own_rank() in self.ranks else -1


class Done:
    """The handle of a collective that was asked for with ``async_op``: it is over."""

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True


_world: list[Group] = []


def own_rank() -> int:
    """Return this process's rank in the world."""
    return int(os.environ.get(RANK, "0"))


def world_size() -> int:
    """Return how many processes there are."""
    return int(os.environ.get(SIZE, "1"))


def init_process_group(*_: Any, **__: Any) -> None:
    """Join the world. The backend is MindSpore's, whatever is asked for."""
    name = ""
    if world_size() > 1:
        communication = load("mindspore.communication")
        communication.init("mccl")
        name = communication.GlobalComm.WORLD_COMM_GROUP
    _world.append(Group(range(world_size()), name))


def destroy_process_group(group: Any = None) -> None:
    """Leave the world."""
    if group is None and _world:
        _world.clear()
        if world_size() > 1:
            load("mindspore.communication").release()


def is_initialized() -> bool:
    """Tell whether this process has joined the world."""
    return bool(_world)


def new_group(ranks: Sequence[int] | None = None, *_: Any, **__: Any) -> Group:
    """Return a group of ``ranks``; MindSpore makes one only where it is needed."""
    chosen = tuple(range(world_size())) if ranks is None else tuple(ranks)
    if len(chosen) == world_size():
        return Group(chosen, _world[0].name)
    if len(chosen) == 1 or own_rank() not in chosen:
        return Group(chosen, "")
    name = "ranks_" + "_".join(str(rank) for rank in chosen)
    load("mindspore.communication").create_group(name, list(chosen))
    return Group(chosen, name)


def get_rank(group: Group | None = None) -> int:
    """Return this process's rank in ``group``."""
    return (group or _world[0]).rank()


def get_world_size(group: Group | None = None) -> int:
    """Return the size of ``group``."""
    return (group or _world[0]).size()


def get_process_group_ranks(group: Group | None = None) -> list[int]:
    """Return the world ranks of ``group``."""
    return list((group or _world[0]).ranks)


def all_reduce(
    tensor: Any, op: Any = None, group: Group | None = None, async_op: bool = False
) -> Done | None:
    """Reduce ``tensor`` in place: a sum, or a maximum or minimum of what was gathered.

    Raises:
        NotImplementedError: another operation.
    """
    group = group or _world[0]
    if group.size() > 1:
        operations = load("mindtorch.distributed").ReduceOp
        tensor.copy_(_reduced(tensor, operations.SUM if op is None else op, group, operations))
    return Done() if async_op else None


def _reduced(tensor: Any, op: Any, group: Group, operations: Any) -> Any:
    torch = load("mindtorch")
    with torch.no_grad():
        if op == operations.SUM:
            return _primitive("AllReduce", group=group.name)(tensor.contiguous())
        parts = _gathered(tensor, group)
        choose = {operations.MAX: torch.maximum, operations.MIN: torch.minimum}.get(op)
        if choose is None:
            raise NotImplementedError(
                f"MindSpore CPU reduces by sums; maximum and minimum are emulated; not {op}"
            )
        result = parts[0]
        for part in parts[1:]:
            result = choose(result, part)
        return result


@functools.cache
def _primitive(name: str, **arguments: Any) -> Any:
    return getattr(load("mindspore.ops"), name)(**arguments)


def _gathered(tensor: Any, group: Group) -> list[Any]:
    whole = _primitive("AllGather", group=group.name)(tensor.contiguous().view(1, -1))
    return [whole[rank].view(*tensor.shape) for rank in range(group.size())]


def all_gather(
    tensor_list: list[Any], tensor: Any, group: Group | None = None, async_op: bool = False
) -> Done | None:
    """Gather ``tensor`` of every rank into ``tensor_list``."""
    group = group or _world[0]
    parts = _gathered(tensor, group) if group.size() > 1 else [tensor]
    for received, part in zip(tensor_list, parts, strict=True):
        received.copy_(part)
    return Done() if async_op else None


def broadcast(tensor: Any, src: int, group: Group | None = None, async_op: bool = False) -> Done | None:
    """Give every rank of ``group`` the tensor of world rank ``src``, in place."""
    group = group or _world[0]
    if group.size() > 1:
        broadcast_from = _primitive("Broadcast", root_rank=group.ranks.index(src), group=group.name)
        tensor.copy_(broadcast_from((tensor.contiguous(),))[0])
    return Done() if async_op else None


def broadcast_object_list(
    object_list: list[Any], src: int = 0, group: Group | None = None, device: Any = None
) -> None:
    """Give every rank the picklable objects of world rank ``src``, in place, as bytes in int64."""
    torch, group = load("mindtorch"), group or _world[0]
    if group.size() == 1:
        return
    sends = own_rank() == src
    content = np.frombuffer(pickle.dumps(list(object_list)) if sends else b"", np.uint8).astype(np.int64)
    length = torch.from_numpy(np.array([content.size], np.int64))
    broadcast(length, src, group)
    carried = torch.from_numpy(content if sends else np.zeros(int(length.item()), np.int64))
    broadcast(carried, src, group)
    # another rank of this very run sent it
    object_list[:] = pickle.loads(carried.numpy().astype(np.uint8).tobytes())


def barrier(group: Group | None = None, *_: Any, **__: Any) -> None:
    """Wait for every rank of ``group``: by a sum, since a barrier is not there on a CPU."""
    torch = load("mindtorch")
    all_reduce(torch.zeros(1), group=group)


_FUNCTIONS = (
    *(init_process_group, destroy_process_group, is_initialized, new_group, get_rank, get_world_size),
    *(get_process_group_ranks, all_reduce, all_gather, broadcast, broadcast_object_list),
    barrier,
)


def _use_mindspore_collectives() -> None:
    distributed = load("mindtorch.distributed")
    for owner in (distributed, distributed.distributed_c10d):
        for function in _FUNCTIONS:
            setattr(owner, function.__name__, function)


PIECES = (
    CompatPiece(
        name="collectives",
        mends=Mends.MINDSPORE_CPU,
        changes=tuple(f"torch.distributed.{function.__name__}" for function in _FUNCTIONS),
        why="mindtorch's process groups are for Ascend. MindSpore CPU sums, gathers and broadcasts over "
        "mccl; a maximum is taken of what was gathered; a group of one, which would hang, is left alone. "
        "Ranks are read from RANK_ID and RANK_SIZE.",
        error_without="RuntimeError: For 'init', the argument 'backend_name' must be one of; and a hang in "
        "a group of one",
        when="every run",
        apply=_use_mindspore_collectives,
    ),
)
