"""Compare: a pair and a policy in, a verdict with named metrics out."""

from __future__ import annotations

from mindspeed_precision.compare.policy import DEFAULT_POLICY, Policy, load_policy, policy_names
from mindspeed_precision.compare.verdict import compare_pair

__all__ = ["DEFAULT_POLICY", "Policy", "compare_pair", "load_policy", "policy_names"]
