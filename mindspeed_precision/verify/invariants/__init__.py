"""Invariants of one run, for ``check``; importing a module registers what it holds."""

from __future__ import annotations

from mindspeed_precision.verify.invariants import (
    accumulation,
    buffers,
    collectives,
    counters,
    data,
    grad_norm,
    groups,
    hyperparameters,
    in_effect,
    layout,
    loss,
    movement,
    nonfinite,
    optimizer_state,
    optimizer_step,
    products,
    randomness,
    rates,
    recompute,
    reduction,
    replicas,
    rows,
    symptoms,
    transfers,
    vacuity,
)
from mindspeed_precision.verify.invariants.registry import INVARIANTS

MODULES = (
    vacuity,
    in_effect,
    groups,
    nonfinite,
    data,
    randomness,
    recompute,
    rows,
    transfers,
    collectives,
    loss,
    products,
    accumulation,
    buffers,
    reduction,
    replicas,
    grad_norm,
    hyperparameters,
    counters,
    rates,
    optimizer_state,
    optimizer_step,
    movement,
    layout,
    symptoms,
)

__all__ = ["INVARIANTS", "MODULES"]
