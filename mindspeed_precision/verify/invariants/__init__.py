"""Invariants of one run, for ``check``; importing a module registers what it holds."""

from __future__ import annotations

from mindspeed_precision.verify.invariants import groups, in_effect
from mindspeed_precision.verify.invariants.registry import INVARIANTS

__all__ = ["INVARIANTS", "groups", "in_effect"]
