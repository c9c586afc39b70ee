"""Canonical numbers of a shard's elements, in numpy alone: what makes fingerprints of shards add up."""

from __future__ import annotations

import math
import re
from collections.abc import Container
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.records import Part, Placement, RankCoordinates, RecordKey, Role, Split

TENSOR_GROUP = "the tensor-parallel group"
EMBEDDING_GROUP = "the pipeline stages that share the embedding"
CONTEXT_GROUP = "the context-parallel group"
"""The groups over which a tensor may be a partial sum (``Placement.partial``)."""

_AND = " and "
"""Between the groups of a sum over several."""

PARAMETER_ROLES = frozenset(
    {
        Role.WGRAD,
        Role.BGRAD,
        Role.MAIN_GRAD,
        Role.REDUCED_GRAD,
        Role.PARAM,
        Role.EXP_AVG,
        Role.EXP_AVG_SQ,
        Role.MASTER_PARAM,
    }
)
"""What has one element for each element of a parameter."""

_OF_VOCABULARY = re.compile(r"(?:.*\.)?(?:word_embeddings\.weight|output_layer\.(?:weight|bias))")


def runs_of(part: Part) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the runs of canonically consecutive elements that a part consists of, in its C order.

    Args:
        part: what a tensor holds.

    Returns:
        ``(starts, lengths)``, ``[n]`` each, in elements; lengths are above 0 and add up to the part's own.
    """
    first, last = part.start, part.stop
    if part.placement.whole or first == last:
        kept = [first][: last - first]
        return np.array(kept, np.int64), np.array([last - first] * len(kept), np.int64)
    starts, lengths, size = _runs_of_row(part.placement)
    held = int(lengths.sum())
    rows = np.arange(first // held, -(-last // held), dtype=np.int64)
    starts = (rows[:, None] * size + starts).reshape(-1)
    lengths = np.tile(lengths, len(rows))
    begins = np.cumsum(lengths) - lengths + first // held * held  # in the C order of what is held
    before = np.clip(first - begins, 0, lengths)
    lengths = np.clip(last - begins, 0, lengths) - before
    kept_runs = lengths > 0
    return _joined((starts + before)[kept_runs], lengths[kept_runs])


def _runs_of_row(placement: Placement) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Return the runs of one index of the dimensions before the first split, and how many elements it has."""
    *outer, innermost = placement.splits
    inner = math.prod(placement.shape[innermost.dim + 1 :])
    starts, lengths = (np.array(column, np.int64) * inner for column in zip(*innermost.blocks, strict=True))
    size, end = placement.shape[innermost.dim] * inner, innermost.dim
    for split in reversed(outer):
        between = math.prod(placement.shape[split.dim + 1 : end])
        rows = (places_of(split)[:, None] * between + np.arange(between)).reshape(-1)
        starts = (rows[:, None] * size + starts).reshape(-1)
        lengths = np.tile(lengths, len(rows))
        size, end = size * between * placement.shape[split.dim], split.dim
    return starts, lengths, size


def _joined(
    starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Merge runs that follow each other."""
    heads = np.flatnonzero(np.append(True, starts[1:] != starts[:-1] + lengths[:-1]))[: len(starts)]
    return starts[heads], np.add.reduceat(lengths, heads) if len(heads) else lengths


def joined(blocks: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Join blocks ``(offset, length)`` that follow each other."""
    joined = [blocks[0]]
    for offset, length in blocks[1:]:
        if sum(joined[-1]) == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((offset, length))
    return tuple(joined)


def canonical_index(part: Part, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
    """Return the index in the canonical tensor, in C order, of the elements of a part.

    Args:
        part: what a tensor holds.
        start: first element of the part, in the C order of what the rank holds.
        stop: one beyond the last; None: all that follow.

    Returns:
        ``[stop - start]``, ascending along each block.
    """
    placement = part.placement
    last = part.stop if stop is None else part.start + stop
    rest = np.arange(part.start + start, last, dtype=np.int64)
    if placement.whole:
        return rest
    index, scale, end = np.zeros_like(rest), 1, len(placement.shape)
    for split in reversed(placement.splits):
        inner = math.prod(placement.shape[split.dim + 1 : end])
        rest, column = np.divmod(rest, split.held * inner)
        along, within = np.divmod(column, inner)
        index += (places_of(split)[along] * inner + within) * scale
        scale, end = scale * placement.shape[split.dim] * inner, split.dim
    return index + rest * scale


def places_of(split: Split) -> NDArray[np.int64]:
    """Return the positions along the dimension that a rank holds, ``[held]``, in its order."""
    return np.concatenate([np.arange(first, first + size) for first, size in split.blocks])


def cut(canonical: NDArray[np.generic], placement: Placement) -> NDArray[np.generic]:
    """Return what a rank holds of a canonical tensor.

    Args:
        canonical: ``[...]`` of the placement's canonical shape.
        placement: where the rank's tensor sits.

    Returns:
        ``[...]`` of the placement's local shape; a copy unless the placement is whole.
    """
    for split in placement.splits if not placement.whole else ():
        canonical = canonical.take(places_of(split), axis=split.dim)
    return canonical


def term_of(placement: Placement, where: RankCoordinates) -> tuple[int, int]:
    """Return which term of a partial sum a rank holds, and how many terms there are.

    Raises:
        KeyError: a group is none that is known here.
    """
    terms = {
        TENSOR_GROUP: (where.tp_rank, where.tp_size),
        EMBEDDING_GROUP: (where.pp_rank, 2),  # the first stage and the last one
        CONTEXT_GROUP: (where.cp_rank, where.cp_size),
    }
    term, count = 0, 1
    for name in placement.partial.split(_AND):
        rank, size = terms[name]
        term, count = term * size + rank, count * size
    return term, count


def summed_over(placement: Placement, group: str) -> Placement:
    """Return the placement of a term of a sum over one group more."""
    return replace(placement, partial=_AND.join(filter(None, (placement.partial, group))))


def without_sum(placement: Placement, group: str) -> Placement:
    """Return the placement of what is summed over all groups of a sum but one."""
    groups = [name for name in placement.partial.split(_AND) if name != group]
    return replace(placement, partial=_AND.join(groups))


def of_vocabulary(name: str) -> bool:
    """Tell whether a parameter has a row for each entry of the vocabulary, and for its padding."""
    return _OF_VOCABULARY.fullmatch(name) is not None


def parameter_of(key: RecordKey, known: Container[str]) -> str | None:
    """Return the declared parameter that a parameter-like record is about; None for any other record.

    Args:
        key: of the record; dW and the bias's gradient at a GEMM have their module's name.
        known: names of the declared parameters.
    """
    if key.role not in PARAMETER_ROLES:
        return None
    if key.fqn in known:
        return key.fqn
    suffix = {Role.WGRAD: "weight", Role.BGRAD: "bias"}.get(key.role)
    name = f"{key.fqn}.{suffix}" if suffix else ""
    return name if name in known else None
