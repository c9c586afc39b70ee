"""What a second policy says of the same comparisons: the acceptance criterion of Ascend, beside ours."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from mindspeed_precision.align.stand_ins import StandIns
from mindspeed_precision.compare import Policy, load_policy
from mindspeed_precision.diagnose.scalars import loss_error
from mindspeed_precision.records import Acceptance, Comparison, Judgement, Pair, StepScalars

HUAWEI = "huawei"
"""Name of the policy: cosine and mean absolute error of each record, mean relative error of the loss."""

_NONFINITE = ("nans_candidate", "infs_candidate", "nonfinite_differ")


def accept(
    comparisons: Sequence[Comparison],
    scalars: Sequence[StepScalars],
    policy: Policy | None = None,
    *,
    stand_ins: StandIns | None = None,
) -> Acceptance:
    """Judge comparisons that were made for another policy.

    Args:
        comparisons: with their metrics; what a metric lacks is undecided, never passed.
        scalars: losses by step.
        policy: None: ``huawei``.
        stand_ins: for which ranks those of the comparisons stand; None: for themselves.
    """
    policy = policy or load_policy(HUAWEI)
    judged = [(comparison, *judge(comparison, policy)) for comparison in comparisons]
    weight = (stand_ins or StandIns()).weight
    counts: Counter[Judgement] = Counter()
    for one, judgement, _ in judged:
        counts[judgement] += weight(one.pair.rank, one.key)
    failed = next(((one, why) for one, judgement, why in judged if judgement is Judgement.FAILED), None)
    limit, error = policy.max_mean_relative_loss_error, loss_error(scalars)
    loss = Judgement.UNDECIDED
    if limit is not None and error is not None and not math.isnan(error):
        loss = Judgement.PASSED if error <= limit else Judgement.FAILED
    return Acceptance(
        policy=policy.name,
        title=policy.title,
        records={judgement: counts.get(judgement, 0) for judgement in Judgement},
        first_failed=None if failed is None else failed[0].key,
        reason="" if failed is None else failed[1],
        loss=loss,
        loss_error=error,
        loss_limit=limit,
    )


def judge(comparison: Comparison, policy: Policy) -> tuple[Judgement, str]:
    """Judge one comparison, and say why it fails or is not decided."""
    metrics, pair = comparison.metrics, comparison.pair
    if metrics.get("bitwise"):
        return Judgement.PASSED, ""
    if not isinstance(pair, Pair) or "bitwise" not in metrics or pair.baseline.shape != pair.candidate.shape:
        return Judgement.UNDECIDED, comparison.reason
    rule = policy.rule_for(pair.key, pair.candidate.dtype)
    if rule is None:
        known = (
            pair.baseline.digest.exact and pair.candidate.digest.exact
        )  # another tool takes no fingerprints
        return (Judgement.FAILED, "bits differ") if known else (Judgement.UNDECIDED, comparison.reason)
    broken = next((name for name in _NONFINITE if metrics.get(name)), None)
    if broken is not None:
        return Judgement.FAILED, "NaN or infinity on one side only"
    for limit in rule.limits:
        if limit.metric in metrics and not limit.holds(metrics[limit.metric]):
            return Judgement.FAILED, f"{limit.metric} {metrics[limit.metric]:.3g}"
    known = all(limit.metric in metrics for limit in rule.limits)
    return (Judgement.PASSED if known else Judgement.UNDECIDED), ""
