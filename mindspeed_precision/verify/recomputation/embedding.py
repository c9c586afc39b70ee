"""Word embeddings: each row is that of its token, bit for bit; dW is the sum over the tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.records import Phase, Role, TensorRecord
from mindspeed_precision.verify.elements import Vector, roundoff
from mindspeed_precision.verify.places import tensor_group
from mindspeed_precision.verify.recomputation.calls import (
    ModuleCall,
    calls_of,
    elements,
    is_plain,
    parameter_before,
)
from mindspeed_precision.verify.recomputation.exact import Exact, Found, Left
from mindspeed_precision.verify.run_facts import RunFacts

KINDS = frozenset({"VocabParallelEmbedding", "Embedding"})
WHAT = "word embeddings"


def embeddings(facts: RunFacts, rank: int) -> Found:
    """Yield what word embeddings must have given."""
    for call in _calls(facts, rank):
        yield _rows(facts, call)


def _calls(facts: RunFacts, rank: int) -> Iterator[ModuleCall]:
    for call in calls_of(facts, rank).values():
        if call.kind in KINDS and is_plain(facts, call) and call.fqn.endswith("word_embeddings"):
            yield call


def _tokens(facts: RunFacts, call: ModuleCall) -> NDArray[np.int64] | None:
    found = elements(facts, call.rank, call.received("0", "input_", "input"))
    return None if found is None else found.astype(np.int64)


def _weights(facts: RunFacts, call: ModuleCall) -> Vector | None:
    """Return the whole table, put together over the tensor-parallel group; None: not all was recorded."""
    name = f"{call.fqn}.weight"
    where = facts.ranks[call.rank].coordinates
    own = facts.parameters(call.rank).get(name)
    split = own is not None and own.placement is not None and bool(own.placement.splits)
    alike = [r for r in facts.ranks if tensor_group(facts.ranks[r].coordinates) == tensor_group(where)]
    alike.sort(key=lambda number: facts.ranks[number].coordinates.tp_rank)
    ranks = alike if where.tp_size > 1 and split else [call.rank]
    shards = [elements(facts, r, parameter_before(facts, r, name, call.step)) for r in ranks]
    if any(shard is None for shard in shards) or (
        where.tp_size > 1 and split and len(ranks) != where.tp_size
    ):
        return None
    return np.concatenate([shard for shard in shards if shard is not None])


def _rows(facts: RunFacts, call: ModuleCall) -> Exact | Left:
    record, tokens, table = call.outputs.get("0"), _tokens(facts, call), _weights(facts, call)
    if record is None or tokens is None or table is None or elements(facts, call.rank, record) is None:
        return Left(what=WHAT, why="without elements of tokens, table or output")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < len(table):
        return Left(what=WHAT, why="of tokens outside the table")
    exact = table[tokens]
    if call.values.get("reduce_scatter_embeddings") and facts.ranks[call.rank].coordinates.tp_size > 1:
        where = facts.ranks[call.rank].coordinates
        exact = np.swapaxes(exact, 0, 1)
        if exact.shape[0] % where.tp_size:
            return Left(what=WHAT, why="of a sequence that does not divide")
        exact = np.split(exact, where.tp_size)[where.tp_rank]
    if exact.size != record.numel:
        return Left(what=WHAT, why="whose shapes do not fit")
    return Exact(
        record=record, numbers=exact, allowed=np.zeros(()), of="its table and the tokens, bit for bit"
    )


def embedding_gradients(facts: RunFacts, rank: int) -> Found:
    """Yield what dW of word embeddings must be: the sum over the tokens, and over a tied output layer."""
    if facts.ranks[rank].coordinates.tp_size > 1:
        yield from (Left(what=WHAT, why="of which each rank has a part") for _ in _calls(facts, rank))
        return
    for call in _calls(facts, rank):
        name = f"{call.fqn}.weight"
        made = [
            r for r in facts.of(rank, Phase.WGRAD, Role.WGRAD, step=call.step)
            if r.key.microbatch == call.microbatch
        ]  # fmt: skip
        own = [r for r in made if r.key.fqn == name]
        others = [r for r in made if r.key.fqn == "output_layer"]
        yield _summed(facts, call, own, others)


def _summed(
    facts: RunFacts, call: ModuleCall, own: list[TensorRecord], others: list[TensorRecord]
) -> Exact | Left:
    tokens = _tokens(facts, call)
    arrived = elements(facts, call.rank, call.grad_outputs.get("0"))
    # a fused GEMM adds its dW to main_grad itself: it is no part of what comes to the parameter
    fused = any(record.note for record in others)
    tied = "output_layer.weight" not in facts.parameters(call.rank) and not fused
    second = [elements(facts, call.rank, record) for record in others] if tied else []
    whole = len(own) == 1 and tokens is not None and arrived is not None
    if not whole or any(array is None for array in second) or (tied and len(second) != 1):
        return Left(what=WHAT, why="of which dW, its gradient or the tied output layer's dW was not recorded")
    assert tokens is not None
    assert arrived is not None
    record = own[0]
    if elements(facts, call.rank, record) is None or tokens.size * record.shape[1] != arrived.size:
        return Left(what=WHAT, why="whose dW has no finite elements")
    rows = arrived.reshape(-1, record.shape[1])
    exact, sizes = np.zeros(record.shape), np.zeros(record.shape)
    np.add.at(exact, tokens.reshape(-1), rows)
    np.add.at(sizes, tokens.reshape(-1), np.abs(rows))
    for array in second:
        assert array is not None
        exact, sizes = exact + array, sizes + np.abs(array)
    counts = np.bincount(tokens.reshape(-1), minlength=record.shape[0])[:, None]
    unit = roundoff(record.dtype)
    return Exact(
        record=record,
        numbers=exact,
        allowed=(np.minimum(counts, 4 * np.sqrt(counts)) + 3) * unit * sizes,
        of="the gradients of its tokens" + (" and dW of the tied output layer" if tied else ""),
    )
