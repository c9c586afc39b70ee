"""Per-step statistics for TensorBoard and Weights & Biases, written by their own libraries."""

from __future__ import annotations

from mindspeed_precision.export.live import LiveExport, open_live
from mindspeed_precision.export.offline import export_run
from mindspeed_precision.export.values import Seen, StepValues, seen_of, seen_of_text
from mindspeed_precision.export.writers import TensorBoardWriter, ValueWriter, WandbWriter

__all__ = [
    "LiveExport",
    "Seen",
    "StepValues",
    "TensorBoardWriter",
    "ValueWriter",
    "WandbWriter",
    "export_run",
    "open_live",
    "seen_of",
    "seen_of_text",
]
