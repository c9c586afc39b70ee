"""How Megatron splits a parameter over the tensor-parallel group, by its name alone.

A file of the format ``torch`` has the shards and not the attributes that say how they are parts of a whole.
The rule is that of megatron-core's layers (``capture.placement`` reads the same from live parameters):

- split along dimension 0: weight and bias of the column-parallel linears (query, key and value, the first
  linear of an MLP, the up projections of latent attention), the word embeddings, the output layer;
- a gated MLP's first linear is split in two halves: rank r of n has the r-th part of the gate, then the r-th
  part of the other half;
- split along dimension 1: the weight of the row-parallel linears (``linear_proj``, ``linear_fc2``);
- everything else is on every rank whole: norms, the router, biases of row-parallel linears.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from mindspeed_precision.ckpt.stored import Copies, Stored, joined
from mindspeed_precision.errors import CheckpointError
from mindspeed_precision.records import Placement, Split

_COLUMNS = re.compile(
    r"(?:.*\.)?(?:linear_qkv|linear_fc1|linear_q|linear_kv|linear_q_proj|linear_q_up_proj|linear_kv_up_proj"
    r"|linear_qb|linear_kvb|word_embeddings|output_layer|query_key_value|dense_h_to_4h)\.(?:weight|bias)"
)
_ROWS = re.compile(r"(?:.*\.)?(?:linear_proj|linear_fc2|dense|dense_4h_to_h)\.weight")
_GATED = re.compile(r"(?:.*\.)?(?:linear_fc1|dense_h_to_4h)\.(?:weight|bias)")
_SEVERAL = re.compile(r".*\.mixer\.(?:in_proj|conv1d)\.\w+")


def over_ranks(
    name: str, shards: Sequence[Stored], *, gated: bool, source: str
) -> tuple[Stored, Copies | None]:
    """Put the shards of one parameter together.

    Args:
        name: canonical.
        shards: of the tensor-parallel ranks, in their order.
        gated: whether the model's MLPs are gated.
        source: where they come from, in words.

    Returns:
        The whole, and the copies of a parameter that every rank has, where they differ.

    Raises:
        CheckpointError: it is not known how this one is split, or the shards do not fit.
    """
    if len(shards) == 1:
        return shards[0], None
    if len({shard.shape for shard in shards}) != 1:
        found = ", ".join(str(list(shard.shape)) for shard in shards)
        raise CheckpointError("shards of several shapes", where=f"{source}: {name}", found=found)
    dim = split_dimension(name, len(shards[0].shape))
    if dim is None:
        return shards[0], unequal(name, shards)
    pieces = 2 if gated and _GATED.fullmatch(name) else 1
    shape = list(shards[0].shape)
    if shape[dim] % pieces:
        raise CheckpointError("a gated MLP of odd size", where=f"{source}: {name}", found=str(shape))
    held, count = shape[dim] // pieces, len(shards)
    shape[dim] *= count
    placed = []
    for rank, shard in enumerate(shards):
        blocks = tuple(((piece * count + rank) * held, held) for piece in range(pieces))
        placed.append((shard, Placement(shape=tuple(shape), splits=(Split(dim=dim, blocks=blocks),))))
    return joined(placed, shape, name=name, source=source), None


def split_dimension(name: str, dimensions: int) -> int | None:
    """Return along which dimension a parameter is split; None: every rank has all of it.

    Raises:
        CheckpointError: it holds several things that are split each (Mamba), which files do not tell apart.
    """
    if _SEVERAL.fullmatch(name):
        raise CheckpointError("several things are split in this weight", where=name)
    if _COLUMNS.fullmatch(name):
        return 0
    return 1 if _ROWS.fullmatch(name) and dimensions == 2 else None


def unequal(name: str, copies: Sequence[Stored]) -> Copies | None:
    """Return who holds which bits of a tensor that all should hold alike; None: they do."""
    groups: list[tuple[Stored, list[str]]] = []
    for copy in copies:
        for first, holders in groups:
            if copy.shape == first.shape and np.array_equal(first.bits(), copy.bits()):
                holders.append(copy.source)
                break
        else:
            groups.append((copy, [copy.source]))
    if len(groups) == 1:
        return None
    return Copies(name=name, holders=tuple(tuple(holders) for _, holders in groups))


__all__ = ["over_ranks", "split_dimension", "unequal"]
