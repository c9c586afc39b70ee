"""Read from two runs what the bounds of a policy depend on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from mindspeed_precision.compare.begun import Begun
from mindspeed_precision.compare.calibration import Calibration
from mindspeed_precision.compare.cancellation import Cancellation
from mindspeed_precision.compare.context import Context
from mindspeed_precision.compare.depth import depth_of
from mindspeed_precision.compare.gain import Gains
from mindspeed_precision.compare.policy import Policy
from mindspeed_precision.compare.reach import reach_of
from mindspeed_precision.compare.routes import Routes
from mindspeed_precision.compare.verdict import compare_pair
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.records import Pair, Verdict


def make_context(
    baseline: Run,
    candidate: Run,
    pairs: Sequence[Pair],
    policy: Policy,
    *,
    calibration: Calibration | None = None,
    forced: frozenset[int] = frozenset(),
) -> Context | None:
    """Read what the bounds of a policy depend on; None for a policy whose bounds depend on nothing.

    ``forced`` are the steps that both runs began with one state.
    """
    fixed = not any(limit.growth or limit.rounding for limit in policy.limits) and not any(
        r.cancels_below for r in policy.rules
    )
    if fixed and calibration is None:
        return None
    model = _model_dtype(candidate) or _model_dtype(baseline)  # a dump of another tool declares none
    depth, reach = depth_of(baseline, model), reach_of((baseline, candidate), forced)

    def tolerated(pair: Pair) -> bool:
        found = compare_pair(pair, policy=policy, baseline=baseline, candidate=candidate, context=context)
        return found.verdict in (Verdict.IDENTICAL, Verdict.WITHIN_TOLERANCE)

    context = Context(
        reach=reach,
        depth=depth,
        cancellation=Cancellation(baseline, candidate, pairs),
        gains=Gains(baseline, candidate, pairs),
        begun=Begun(baseline, candidate, pairs, depth=depth, reach=reach, tolerated=tolerated),
        routes=Routes(baseline, candidate, pairs, depth=depth, tolerated=tolerated),
        model=model,
        calibration=calibration,
    )
    return context


def _model_dtype(run: Run) -> str:
    """Return the dtype of most of a model's parameters, by their elements."""
    elements: Counter[str] = Counter()
    for rank in run.ranks.values():
        for parameter in rank.parameters:
            elements[parameter.dtype] += math.prod(parameter.shape)
    return elements.most_common(1)[0][0] if elements else ""
