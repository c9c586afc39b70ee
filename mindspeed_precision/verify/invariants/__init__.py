"""Invariants of one run, for ``check``; importing a module registers what it holds."""

from __future__ import annotations

from mindspeed_precision.verify.invariants import (
    accumulation,
    buffers,
    counters,
    grad_norm,
    hyperparameters,
    movement,
    optimizer_state,
    optimizer_step,
    products,
    rates,
    reduction,
)
from mindspeed_precision.verify.invariants.registry import INVARIANTS

__all__ = [
    "INVARIANTS",
    "accumulation",
    "buffers",
    "counters",
    "grad_norm",
    "hyperparameters",
    "movement",
    "optimizer_state",
    "optimizer_step",
    "products",
    "rates",
    "reduction",
]
