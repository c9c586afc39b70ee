"""Canonical numbers of a shard's elements, in numpy alone: what makes fingerprints of shards add up."""

from __future__ import annotations

import math
from collections.abc import Container

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.records import Part, Placement, RecordKey, Role

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
    local = np.arange(part.start + start, last, dtype=np.int64)
    if placement.whole:
        return local
    inner = math.prod(placement.shape[placement.dim + 1 :])
    places = np.concatenate([np.arange(first, first + size) for first, size in placement.blocks])
    row, column = np.divmod(local, inner)
    outer, along = np.divmod(row, len(places))
    index: NDArray[np.int64] = (outer * placement.shape[placement.dim] + places[along]) * inner + column
    return index


def cut(canonical: NDArray[np.generic], placement: Placement) -> NDArray[np.generic]:
    """Return what a rank holds of a canonical tensor.

    Args:
        canonical: ``[...]`` of the placement's canonical shape.
        placement: where the rank's tensor sits.

    Returns:
        ``[...]`` of the placement's local shape; a copy unless the placement is whole.
    """
    if placement.whole:
        return canonical
    places = np.concatenate([np.arange(first, first + size) for first, size in placement.blocks])
    return canonical.take(places, axis=placement.dim)


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
