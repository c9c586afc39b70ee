"""What a recorded training says while it runs: what to expect, what is wrong, what there is at the end."""

from __future__ import annotations

from mindspeed_precision.live.expectation import Expectation, Shape, expect
from mindspeed_precision.live.lines import Told, finding_lines, start_line, summary_lines, tell

__all__ = [
    "Expectation",
    "Shape",
    "Told",
    "expect",
    "finding_lines",
    "start_line",
    "summary_lines",
    "tell",
]
