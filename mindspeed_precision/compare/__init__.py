"""Compare: a pair and a policy in, a verdict with named metrics out."""

from __future__ import annotations

from mindspeed_precision.compare.calibration import Calibration, calibrate
from mindspeed_precision.compare.context import Context
from mindspeed_precision.compare.making import make_context
from mindspeed_precision.compare.policy import (
    CROSS_POLICY,
    DEFAULT_POLICY,
    LAYOUT_POLICY,
    Policy,
    default_policy,
    load_policy,
    policy_names,
)
from mindspeed_precision.compare.reach import reach_of
from mindspeed_precision.compare.verdict import compare_pair

__all__ = [
    "CROSS_POLICY",
    "DEFAULT_POLICY",
    "LAYOUT_POLICY",
    "Calibration",
    "Context",
    "Policy",
    "calibrate",
    "compare_pair",
    "default_policy",
    "load_policy",
    "make_context",
    "policy_names",
    "reach_of",
]
