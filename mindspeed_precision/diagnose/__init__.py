"""Diagnose: comparisons in, the first divergence and its causes out."""

from __future__ import annotations

from mindspeed_precision.diagnose.pipeline import conclude, find_causes, gather_facts
from mindspeed_precision.diagnose.refine import First, plan_refinement
from mindspeed_precision.diagnose.repeated import not_repeated
from mindspeed_precision.diagnose.replay import prove_by_replay

__all__ = [
    "gather_facts",
    "find_causes",
    "prove_by_replay",
    "not_repeated",
    "conclude",
    "First",
    "plan_refinement",
]
