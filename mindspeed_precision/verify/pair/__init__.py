"""What two launches must have in common, for ``verify``; importing a module registers what it holds."""

from __future__ import annotations

from mindspeed_precision.verify.pair import (
    buffers,
    configuration,
    data,
    environment,
    groups,
    modules,
    schedules,
    weights,
)
from mindspeed_precision.verify.pair.registry import PAIR

__all__ = [
    "PAIR",
    "buffers",
    "configuration",
    "data",
    "environment",
    "groups",
    "modules",
    "schedules",
    "weights",
]
