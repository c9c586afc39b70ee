"""From perturbed runs to bounds: what ``compare --calibrate`` compares before the two runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from mindspeed_precision.align import Mapping, align
from mindspeed_precision.align.mapping import renamed
from mindspeed_precision.compare import (
    LAYOUT_POLICY,
    Calibration,
    Policy,
    calibrate,
    compare_pair,
    load_policy,
    make_context,
    reach_of,
)
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.records import Comparison, Side, Verdict

_REMEDY = (
    "record the baseline again, begun alike, with --precision-debug-set perturb.epsilon=auto and the same "
    "capture settings"
)


def tolerant(policy: Policy, *, asked: bool) -> Policy:
    """Return a policy whose bounds can be calibrated: ``cross_layout`` where nobody asked for ``exact``.

    Raises:
        ConfigError: the policy that was asked for demands equal bits.
    """
    if not policy.exact:
        return policy
    if asked:
        raise ConfigError(
            "a policy that demands equal bits leaves nothing to calibrate",
            where="policy",
            found=policy.name,
            expected=f"{LAYOUT_POLICY}, or another policy with bounds",
        )
    return replace(load_policy(LAYOUT_POLICY), why="taken because its bounds are calibrated")


def calibration_of(
    baseline: Run,
    candidate: Run,
    perturbed: Sequence[Run],
    *,
    policy: Policy,
    mappings: Sequence[Mapping] = (),
    start_of: Callable[[int], int],
) -> Calibration:
    """Compare the baseline with its perturbed runs.

    Rounding grows from where both runs had one state. So a step of a perturbed run says something of the
    candidate's where both began alike: with the runs, or with a state that they took from the baseline.

    Args:
        baseline: the run to agree with, as it was loaded.
        candidate: the run that is examined: it tells which mapping is the baseline's.
        perturbed: runs of the baseline with perturbed parameters, in any layout.
        policy: whose bounds are calibrated.
        mappings: names and conventions that differ between baseline and candidate.
        start_of: the last step, up to a given one, that baseline and candidate began with one state.

    Raises:
        ConfigError: a run was not perturbed, or moves nothing.
        IncomparableError: it is of another model, or has no step or rank in common with the baseline.
    """
    own = [one for one in mappings if one.side_of(baseline, candidate) is Side.BASELINE]
    one, _ = renamed(baseline, own, Side.BASELINE)
    compared: list[Comparison] = []
    unlike: set[int] = set()
    for run in perturbed:
        if not run.perturbed:
            raise ConfigError(
                "that run was not perturbed",
                where=f"--calibrate {run.path}",
                expected="a run with the setting perturb.epsilon",
                remedy=_REMEDY,
            )
        two, _ = renamed(run, own, Side.BASELINE)
        found, forced = _compare(one, two, policy)
        if not any(c.verdict is not Verdict.IDENTICAL and c.key.step >= 0 for c in found):
            raise ConfigError(
                "the noise of that run moved no record of a step",
                where=f"--calibrate {run.path}",
                found=run.perturbed,
                remedy=_REMEDY,
            )
        starts = reach_of((one, two), forced)
        for comparison in found:
            step = comparison.key.step
            if starts.start_of(step) == start_of(step):
                compared.append(comparison)
            else:
                unlike.add(step)
    said = [f"{Path(run.path).name}: {run.perturbed}" for run in perturbed]
    return calibrate(said, compared, policy.limits, start_of=start_of, unlike=unlike)


def _compare(baseline: Run, perturbed: Run, policy: Policy) -> tuple[list[Comparison], frozenset[int]]:
    """Compare every pair; return with them the steps that both runs began with one state."""
    aligned = align(baseline, perturbed)
    one, two = aligned.baseline, aligned.candidate
    context = make_context(one, two, aligned.pairs, policy, forced=aligned.forced)
    compared = [
        compare_pair(pair, policy=policy, baseline=one, candidate=two, context=context)
        for pair in aligned.pairs
    ]
    return compared, aligned.forced
