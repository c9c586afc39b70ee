"""One pair, one verdict: bits first, then what the policy tolerates."""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_precision.compare.metrics import Metrics, element_metrics, kind_mismatch, record_metrics
from mindspeed_precision.compare.policy import Limit, Policy
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.records import Comparison, Pair, RecordKey, Role, Verdict

BITS_DIFFER = "bits differ"
"""Reason of every divergence under a policy that tolerates nothing."""

_EXACT_ROLES = {Role.HYPERPARAMETER, Role.BATCH, Role.RNG}
"""What a run is given rather than computes: no rounding excuses a difference."""


def compare_pair(pair: Pair, *, policy: Policy, baseline: Run, candidate: Run) -> Comparison:
    """Judge one pair.

    Elements are read only where the fingerprints differ and both runs kept them.

    Args:
        pair: the two records.
        policy: what is aligned.
        baseline: the run of ``pair.baseline``, for its payload.
        candidate: the run of ``pair.candidate``.

    Raises:
        DumpError: a payload that the index promises cannot be read.
    """
    mismatch = kind_mismatch(pair.baseline, pair.candidate)
    if mismatch:
        return Comparison(
            pair=pair, verdict=Verdict.INCOMPARABLE, metrics={"bitwise": False}, reason=mismatch
        )
    metrics = record_metrics(pair.baseline, pair.candidate)
    if metrics["bitwise"]:
        return Comparison(pair=pair, verdict=Verdict.IDENTICAL, metrics=metrics)
    if pair.baseline.payload is not None and pair.candidate.payload is not None:
        metrics |= element_metrics(
            baseline.ranks[pair.rank].payload(pair.baseline),
            candidate.ranks[pair.rank].payload(pair.candidate),
        )
    verdict, reason = _judge(policy, pair.candidate.dtype, pair.key, metrics)
    return Comparison(pair=pair, verdict=verdict, metrics=metrics, reason=reason)


def _judge(policy: Policy, dtype: str, key: RecordKey, metrics: Metrics) -> tuple[Verdict, str]:
    """Apply the policy to metrics of a pair whose bits differ."""
    rule = None if key.role in _EXACT_ROLES else policy.rule_for(dtype)
    if rule is None:
        return Verdict.DIVERGED, BITS_DIFFER
    known = [limit for limit in rule.limits if limit.metric in metrics]
    if not known or (rule.every and len(known) < len(rule.limits)):
        needed = ", ".join(limit.metric for limit in rule.limits if limit.metric not in metrics)
        return Verdict.MISSING, f"policy {policy.name} needs {needed}, which the records do not support"
    broken = _first_broken(known if rule.every else known[:1], metrics)
    if broken is None:
        return Verdict.WITHIN_TOLERANCE, "bits differ, within " + ", ".join(
            limit.describe() for limit in known
        )
    return Verdict.DIVERGED, f"{broken.metric} {metrics[broken.metric]:.3g}, allowed is {broken.describe()}"


def _first_broken(limits: list[Limit], metrics: Mapping[str, float | int | bool]) -> Limit | None:
    return next((limit for limit in limits if not limit.holds(metrics[limit.metric])), None)
