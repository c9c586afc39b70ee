"""Invariants of one run, for ``check``; importing a module registers what it holds."""

from __future__ import annotations

from mindspeed_precision.verify.invariants import (
    collectives,
    data,
    layout,
    loss,
    nonfinite,
    randomness,
    recompute,
    replicas,
    rows,
    symptoms,
    transfers,
    vacuity,
)
from mindspeed_precision.verify.invariants.registry import INVARIANTS

MODULES = (
    vacuity,
    nonfinite,
    data,
    randomness,
    recompute,
    rows,
    transfers,
    collectives,
    loss,
    replicas,
    layout,
    symptoms,
)

__all__ = ["INVARIANTS", "MODULES"]
