"""One pair, one verdict: bits first, then what the policy tolerates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.compare.context import Context
from mindspeed_precision.compare.estimates import BOUNDED, sketch_limit, sketch_metrics
from mindspeed_precision.compare.metrics import Metrics, element_metrics, kind_mismatch, record_metrics
from mindspeed_precision.compare.policy import Limit, Policy, RecordRule
from mindspeed_precision.compare.routes import REROUTED, by_rows, of_map, of_other_tokens
from mindspeed_precision.compare.summaries import norm_slack, summarised, told_by_summaries
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.record.elements import to_bits, to_numbers
from mindspeed_precision.records import Comparison, Pair, Side, Verdict

BITS_DIFFER = "bits differ"
"""Reason of every divergence under a policy that tolerates nothing."""

TOLERANCES = "tolerances"
"""Metric: how much of what is tolerated was used, by the bound of which most was; beyond 1 it diverges."""

CANCELS = "cancels to noise"
"""Said of a gradient that is zero in mathematics: no digit of what is left can agree."""

_BY_NORM = ("rel_frobenius", "norm_change", "norm_update_share")
"""Bounds whose place an estimate takes."""

_NONFINITE = ("nans_baseline", "infs_baseline", "nonfinite_differ")

_Elements = tuple[HostTensor, HostTensor]


def compare_pair(
    pair: Pair, *, policy: Policy, baseline: Run, candidate: Run, context: Context | None = None
) -> Comparison:
    """Judge one pair.

    Elements are read only where the fingerprints differ and both runs kept them.

    Args:
        pair: the two records.
        policy: what is aligned.
        baseline: the run of ``pair.baseline``, for its payload.
        candidate: the run of ``pair.candidate``.
        context: what the policy's bounds depend on beside the pair (``make_context``); None: nothing.

    Raises:
        DumpError: a payload that the index promises cannot be read.
    """
    rerouted = context.routes.rerouted(pair) if context is not None else None
    if rerouted is not None:
        return of_other_tokens(pair, rerouted.count)
    mismatch = kind_mismatch(pair.baseline, pair.candidate)
    if mismatch:
        return _incomparable(pair, mismatch)
    if pair.addend is not None:
        return _compare_sums(pair, policy, (baseline, candidate), context)
    metrics = record_metrics(pair.baseline, pair.candidate)
    if metrics["bitwise"]:
        return Comparison(pair=pair, verdict=Verdict.IDENTICAL, metrics=metrics)
    parameter = context.begun.parameter(pair) if context is not None else None
    if parameter is not None:
        found = compare_pair(
            parameter, policy=policy, baseline=baseline, candidate=candidate, context=context
        )
        return replace(found, pair=pair, reason=f"it is {parameter.key.fqn}: {found.reason}")
    elements = _read(pair, baseline, candidate)
    if elements is not None and not _bits_known(pair) and bool((elements[0].bits == elements[1].bits).all()):
        reason = "fingerprints of what was put together are not known; every element has the same bits"
        return Comparison(
            pair=pair, verdict=Verdict.IDENTICAL, metrics=metrics | {"bitwise": True}, reason=reason
        )
    if elements is None and summarised(pair):
        rule = policy.rule_for(pair.key, pair.candidate.dtype, context.model if context is not None else "")
        told = told_by_summaries(pair, baseline, candidate, exact=rule is None)
        if told is not None:
            metrics["bitwise"] = told[0] is Verdict.IDENTICAL
            return Comparison(pair=pair, verdict=told[0], metrics=metrics, reason=told[1])
    flips = context.routes.of_map(pair) if context is not None else None
    if flips is not None:
        return of_map(pair, flips, metrics)
    return _judge(pair, policy, metrics, elements, context)


def _bits_known(pair: Pair) -> bool:
    return pair.baseline.digest.exact and pair.candidate.digest.exact


def _incomparable(pair: Pair, reason: str) -> Comparison:
    return Comparison(pair=pair, verdict=Verdict.INCOMPARABLE, metrics={"bitwise": False}, reason=reason)


def _read(pair: Pair, baseline: Run, candidate: Run) -> _Elements | None:
    """Return the elements of both sides; None where one side did not keep them."""
    if pair.baseline.payload is None or pair.candidate.payload is None:
        return None
    return (
        baseline.ranks[pair.rank].payload(pair.baseline),
        candidate.ranks[pair.rank].payload(pair.candidate),
    )


def _compare_sums(pair: Pair, policy: Policy, runs: tuple[Run, Run], context: Context | None) -> Comparison:
    """Judge a pair of which one side lacks an addend by convention (``Pair.addend``)."""
    assert pair.addend is not None
    elements, addend = _read(pair, *runs), pair.addend.record
    if elements is None or addend is None or addend.payload is None:
        lacking = "no elements were kept" if elements is None else "what is to be added was not kept"
        return _incomparable(pair, f"{pair.addend.side.value}: {pair.addend.reason}; {lacking}")
    one, two = elements
    added = runs[pair.addend.side is Side.CANDIDATE].ranks[pair.rank].payload(addend)
    if pair.addend.side is Side.BASELINE:
        one = _sum(one, added)
    else:
        two = _sum(two, added)
    metrics: Metrics = {"bitwise": bool((one.bits == two.bits).all())}
    if metrics["bitwise"]:
        reason = f"{pair.addend.side.value}: {pair.addend.reason}, added for the comparison"
        return Comparison(pair=pair, verdict=Verdict.IDENTICAL, metrics=metrics, reason=reason)
    return _judge(pair, policy, metrics, (one, two), context)


def _sum(tensor: HostTensor, addend: HostTensor) -> HostTensor:
    """Add along the last dimension as the framework would: in the tensor's dtype, rounded once."""
    total = to_numbers(tensor) + to_numbers(addend)
    return HostTensor(bits=to_bits(total, tensor.dtype), dtype=tensor.dtype)


def _judge(
    pair: Pair, policy: Policy, metrics: Metrics, elements: _Elements | None, context: Context | None
) -> Comparison:
    """Apply the policy to a pair whose bits differ."""

    def decided(verdict: Verdict, reason: str) -> Comparison:
        return Comparison(pair=pair, verdict=verdict, metrics=metrics, reason=reason)

    if elements is not None:
        metrics |= element_metrics(*elements)
    else:
        metrics |= sketch_metrics(pair.baseline, pair.candidate)
    rule = policy.rule_for(pair.key, pair.candidate.dtype, context.model if context is not None else "")
    if rule is None:
        return decided(Verdict.DIVERGED, BITS_DIFFER)
    if any(metrics.get(name) for name in _NONFINITE) or _counts_differ(metrics):
        return decided(Verdict.DIVERGED, "NaN or infinity on one side only")
    regained = _regained(pair, rule, metrics, context)
    if regained:
        return decided(Verdict.DIVERGED, regained)
    elements = _alike_routes(pair, elements, metrics, context)
    noise = context.cancelled(pair, rule) if context is not None else None
    said = ""
    if noise is not None and bool(noise.all()):
        metrics["noise_elements"] = pair.candidate.numel
        return decided(Verdict.WITHIN_TOLERANCE, f"{CANCELS}: {_norms(pair)}, far below what was summed")
    if noise is not None and elements is not None:
        metrics |= _without(elements, noise)
        said = f"; {metrics['noise_elements']} of {pair.candidate.numel} elements {CANCELS} and are left out"
    if context is not None:
        metrics |= context.update_metrics(pair, rule)
    verdict, reason = _verdict(limits_for(rule, metrics, pair, context), rule, policy, metrics)
    return decided(verdict, reason + (said or _left_out(metrics)))


def _left_out(metrics: Metrics) -> str:
    if metrics.get(REROUTED):
        return f"; {metrics[REROUTED]} tokens took another route, and are left out"
    if metrics.get("noise_elements"):
        return f"; the gradient of {metrics['noise_elements']} elements {CANCELS}"
    return ""


def _alike_routes(
    pair: Pair, elements: _Elements | None, metrics: Metrics, context: Context | None
) -> _Elements | None:
    """Return the elements with the rows of tokens that took another route alike, and measure the others."""
    rows = context.routes.rows(pair) if context is not None else None
    mask = by_rows(rows, pair.candidate.shape) if rows is not None else None
    if rows is None or mask is None or elements is None:
        return elements
    one, two = elements
    two = replace(two, bits=np.where(mask, one.bits, two.bits))
    metrics |= element_metrics(one, two) | {REROUTED: int(rows.sum())}
    return one, two


def _regained(pair: Pair, rule: RecordRule, metrics: Metrics, context: Context | None) -> str:
    """Say that the reduction multiplies a gradient by another factor; empty where it does not."""
    gain = context.gains.change(pair) if context is not None and rule.max_gain_change else None
    if gain is None:
        return ""
    metrics["gain_change"] = gain.change
    if abs(gain.change) <= rule.max_gain_change + gain.error:
        return ""
    said = f"the reduction multiplies it by {1 + gain.change:.6f} times what the baseline's does"
    return f"{said}, allowed is a change of {rule.max_gain_change:g}"


def _counts_differ(metrics: Metrics) -> bool:
    return any(f"{name}_candidate" in metrics for name in ("nans", "infs"))


def _norms(pair: Pair) -> str:
    one, two = pair.baseline.digest.statistics, pair.candidate.digest.statistics
    if one is None or two is None:
        return "both sides are"
    return f"norm {one.l2_norm:.1e} in the baseline and {two.l2_norm:.1e} in the candidate"


def _without(elements: _Elements, noise: NDArray[np.bool_]) -> Metrics:
    """Measure the errors with the noise of one side on both: it then differs nowhere and weighs nothing."""
    one, two = elements
    rest = element_metrics(one, replace(two, bits=np.where(noise, one.bits, two.bits)))
    return rest | {"noise_elements": int(np.count_nonzero(noise))}


def limits_for(
    rule: RecordRule, metrics: Mapping[str, float | int | bool], pair: Pair, context: Context | None
) -> tuple[Limit, ...]:
    """Return the bounds that apply: to the elements where they are known, else to the statistics.

    Where sketches decide a bound on the elements, it takes the place of the one on the norm; of a sum over
    ranks, which has no statistics, that of all others.
    """
    limits = tuple(_bound(limit, pair, context) for limit in rule.limits)
    if all(limit.metric in metrics for limit in limits):
        return limits
    without = tuple(
        _bound(limit, pair, context)
        for limit in rule.without_elements
        if limit.metric not in BOUNDED or limit.metric in metrics
    )
    without = without or limits
    estimated = sketch_limit(limits, metrics)
    if estimated is None:
        return without
    if any(
        not side.digest.exact and side.digest.statistics is None for side in (pair.baseline, pair.candidate)
    ):
        return (estimated,)  # of a sum over ranks the sketch is all that is known
    return tuple(estimated if limit.metric in _BY_NORM else limit for limit in without)


def _bound(limit: Limit, pair: Pair, context: Context | None) -> Limit:
    """Return a bound of the policy for one pair, or the calibrated one that takes its place."""
    if limit.metric == "norm_change":
        limit = replace(limit, maximum=limit.maximum + norm_slack(pair))
    if context is None:
        return limit.at(reach=0.0, unit=0.0)
    unit = context.depth.unit(pair.key, pair.candidate.dtype)
    bound = limit.at(reach=context.reach.before(pair.key.step), unit=unit)
    bound = bound if context.calibration is None else context.calibration.apply(pair, bound)
    return replace(bound, maximum=bound.maximum + context.allowance(pair, limit.metric))


def _verdict(
    limits: tuple[Limit, ...], rule: RecordRule, policy: Policy, metrics: Metrics
) -> tuple[Verdict, str]:
    known = [limit for limit in limits if limit.metric in metrics]
    if not known or (rule.every and len(known) < len(limits)):
        needed = ", ".join(limit.metric for limit in limits if limit.metric not in metrics)
        return Verdict.MISSING, f"policy {policy.name} needs {needed}, which the records do not support"
    used = known if rule.every else known[:1]
    metrics[TOLERANCES] = max(limit.share(metrics[limit.metric]) for limit in used)
    broken = next((limit for limit in used if not limit.holds(metrics[limit.metric])), None)
    if broken is None:
        return Verdict.WITHIN_TOLERANCE, "bits differ, within " + _described(known)
    said = f"{broken.metric} {metrics[broken.metric]:.3g}"
    if broken.metric in BOUNDED:
        said = f"{BOUNDED[broken.metric]} at least {metrics[broken.metric]:.2g} (estimated)"
    return Verdict.DIVERGED, f"{said}, allowed is {_described([broken]).removesuffix(' (estimated)')}"


def _described(limits: Iterable[Limit]) -> str:
    return ", ".join(
        f"{replace(limit, metric=BOUNDED[limit.metric]).describe()} (estimated)"
        if limit.metric in BOUNDED
        else limit.describe()
        for limit in limits
    )


def order_unseen(comparison: Comparison) -> bool:
    """Tell whether a pair that differs was let pass by numbers that a permutation of its elements leaves."""
    pair, metrics = comparison.pair, comparison.metrics
    if comparison.verdict is not Verdict.WITHIN_TOLERANCE or not isinstance(pair, Pair):
        return False
    positional = {"mismatched", "sketch_low"} & metrics.keys()
    if positional or metrics.get("noise_elements") == pair.candidate.numel:
        return False
    known = [side.digest.statistics for side in (pair.baseline, pair.candidate)]
    return any(one is not None and one.l2_norm for one in known)  # zeros of different signs have no order


def direction_unseen(comparison: Comparison) -> bool:
    """Tell whether an updated parameter was let pass by its norm, which says little of where it moved."""
    metrics = comparison.metrics
    seen = {"sketch_update_least", "update_share", "noise_elements"} & metrics.keys()
    by_norm = "norm_update_share" in metrics and "norm_update_share" in comparison.reason
    return comparison.verdict is Verdict.WITHIN_TOLERANCE and by_norm and not seen
