"""Rules: facts in, findings out. One function each; importing a module registers its rules."""

from __future__ import annotations

from mindspeed_precision.diagnose.rules import (
    configuration,
    coverage,
    entering,
    gradients,
    layouts,
    operations,
    optimizer,
    own,
    recomputed,
    replicas,
    undetermined,
    unmoved,
    unreached,
    unseen_wgrad,
)
from mindspeed_precision.diagnose.rules.registry import finding_ids, run_rules

MODULES = (
    entering,
    gradients,
    layouts,
    operations,
    unreached,
    optimizer,
    unmoved,
    unseen_wgrad,
    own,
    recomputed,
    replicas,
    configuration,
    coverage,
    undetermined,
)

__all__ = ["MODULES", "finding_ids", "run_rules"]
