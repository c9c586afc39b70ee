"""Diagnose: comparisons in, the first divergence and its causes out."""

from __future__ import annotations

from mindspeed_precision.diagnose.pipeline import conclude, find_causes, gather_facts
from mindspeed_precision.diagnose.replay import prove_by_replay
from mindspeed_precision.diagnose.window import capture_window

__all__ = ["gather_facts", "find_causes", "prove_by_replay", "conclude", "capture_window"]
