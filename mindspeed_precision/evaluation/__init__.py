"""Evaluation results of two trainings: which tasks both have, and whether chance explains the difference."""

from __future__ import annotations

from mindspeed_precision.evaluation.comparing import compare_evaluations
from mindspeed_precision.evaluation.reading import Results, Score, read_results

__all__ = ["Results", "Score", "compare_evaluations", "read_results"]
