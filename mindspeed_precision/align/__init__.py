"""Align: two runs in, pairs of records and records without a partner out."""

from __future__ import annotations

from mindspeed_precision.align.mapping import Mapping, load_mapping, own_names
from mindspeed_precision.align.match import Alignment, align

__all__ = ["Alignment", "Mapping", "align", "load_mapping", "own_names"]
