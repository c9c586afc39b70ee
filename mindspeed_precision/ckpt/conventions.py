"""Orders in which frameworks keep the rows of fused weights, and how to tell one from another.

Megatron's ``linear_qkv`` has its rows by query group: the queries of the group, its key, its value. Others
keep ``[q; k; v]`` in blocks. A gated MLP's first linear is ``[gate; other half]``; shards that were put one
after another are not. Rotary embeddings pair the two halves of a head (Hugging Face, Megatron) or neighbours
(Meta).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.ckpt.stored import Geometry

Rows = NDArray[np.int64]

_QKV = re.compile(r".*\.self_attention\.linear_qkv\.(?:weight|bias)(?:\[([qk])\])?")
_GATED = re.compile(r".*\.linear_fc1\.(?:weight|bias)")
_HEAD_SIZES = (4, 8, 16, 32, 64, 80, 96, 112, 128, 160, 192, 256)
_RANKS = (2, 4, 8, 16, 32, 64)


def by_group(rows: int, heads: int, groups: int) -> Rows | None:
    """Return the rows of ``[q; k; v]`` in Megatron's order, ``[rows]``; None: these heads do not fit.

    Args:
        rows: of query, key and value together.
        heads: attention heads.
        groups: query groups.
    """
    if not heads or not groups or heads % groups or rows % (heads + 2 * groups):
        return None
    size, each = rows // (heads + 2 * groups), heads // groups
    queries = np.arange(heads * size).reshape(groups, each * size)
    keys = heads * size + np.arange(groups * size).reshape(groups, size)
    ordered: Rows = np.concatenate([queries, keys, keys + groups * size], axis=1).reshape(-1)
    return ordered


def row_orders(name: str, rows: int, geometry: Geometry) -> Iterator[tuple[str, Rows]]:
    """Yield orders that are known to be mistaken for one another: words, and the candidate's rows.

    The candidate has the baseline's rows ``[rows]`` in that order.
    """
    qkv = _QKV.fullmatch(name)
    if qkv and qkv.group(1):
        heads = geometry.heads if qkv.group(1) == "q" else geometry.groups
        yield from _rotary(rows, [(heads, slice(None))] if heads else _every_head(rows))
    elif qkv:
        for heads, groups in _geometries(rows, geometry):
            yield from _of_attention(rows, heads, groups)
    elif _GATED.fullmatch(name) and rows % 2 == 0:
        yield from _of_gated(rows)


def _geometries(rows: int, geometry: Geometry) -> Iterator[tuple[int, int]]:
    if geometry.heads and geometry.groups:
        yield geometry.heads, geometry.groups
        return
    for size in (size for size in _HEAD_SIZES if rows % size == 0):
        together = rows // size
        for groups in range(1, together // 3 + 1):
            if (together - 2 * groups) % groups == 0:
                yield together - 2 * groups, groups


def _of_attention(rows: int, heads: int, groups: int) -> Iterator[tuple[str, Rows]]:
    order = by_group(rows, heads, groups)
    if order is None:
        return
    of = f"{heads} heads, {groups} groups"
    yield f"the baseline's rows are [q; k; v] in blocks, the candidate's by query group ({of})", order
    yield (
        f"the candidate's rows are [q; k; v] in blocks, the baseline's by query group ({of})",
        _inverse(order),
    )
    size, each = rows // (heads + 2 * groups), heads // groups
    grouped = np.arange(rows).reshape(groups, each + 2, size)
    if each == 1:
        apart = grouped.transpose(0, 2, 1).reshape(-1)
        words = "{} rows alternate q, k, v within a head (Megatron's checkpoint version 1)"
        yield words.format("the candidate's"), apart
        yield words.format("the baseline's"), _inverse(apart)
    paired = _paired(size)
    if paired is not None:
        moved = grouped.copy()
        moved[:, : each + 1] = moved[:, : each + 1][:, :, paired]
        yield from _both_rotary(moved.reshape(-1))


def _every_head(rows: int) -> list[tuple[int, slice]]:
    return [(rows // size, slice(None)) for size in _HEAD_SIZES if rows % size == 0]


def _rotary(rows: int, heads: list[tuple[int, slice]]) -> Iterator[tuple[str, Rows]]:
    for count, _ in heads:
        paired = _paired(rows // count) if count and rows % count == 0 else None
        if paired is not None:
            yield from _both_rotary(np.arange(rows).reshape(count, -1)[:, paired].reshape(-1))


def _both_rotary(order: Rows) -> Iterator[tuple[str, Rows]]:
    words = "rotary pairs: {} are neighbours within a head, {} are its halves"
    yield words.format("the candidate's", "the baseline's"), order
    yield words.format("the baseline's", "the candidate's"), _inverse(order)


def _paired(size: int) -> Rows | None:
    return np.arange(size).reshape(2, size // 2).T.reshape(-1) if size % 2 == 0 and size > 2 else None


def _of_gated(rows: int) -> Iterator[tuple[str, Rows]]:
    half = rows // 2
    yield "the two halves are swapped (gate and up projection)", np.roll(np.arange(rows), half)
    alternating = np.arange(rows).reshape(2, half).T.reshape(-1)
    yield "the candidate's rows alternate gate and up", alternating
    yield "the baseline's rows alternate gate and up", _inverse(alternating)
    for ranks in (ranks for ranks in _RANKS if half % ranks == 0 and ranks < half):
        shards = np.arange(rows).reshape(2, ranks, -1).transpose(1, 0, 2).reshape(-1)
        words = f"{{}} gated shards of {ranks} ranks were put one after another"
        yield words.format("the candidate's"), shards
        yield words.format("the baseline's"), _inverse(shards)


def _inverse(order: Rows) -> Rows:
    return np.argsort(order)


def row_words(name: str, row: int, rows: int, geometry: Geometry) -> str:
    """Say what one row of a fused weight is: ``key of group 1``; empty where there is nothing to say."""
    qkv = _QKV.fullmatch(name)
    heads, groups = geometry.heads, geometry.groups
    if qkv and not qkv.group(1) and heads and groups and by_group(rows, heads, groups) is not None:
        size, each = rows // (heads + 2 * groups), heads // groups
        group, within = divmod(row // size, each + 2)
        if within < each:
            return f"query of head {group * each + within}"
        return f"{'key' if within == each else 'value'} of group {group}"
    return ""


__all__ = ["by_group", "row_orders", "row_words"]
