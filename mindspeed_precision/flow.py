"""Two run directories in, one diagnosis out: the offline half, as one reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mindspeed_precision.align import Mapping, align, load_mapping, own_names
from mindspeed_precision.align.compatible import other_tool
from mindspeed_precision.calibrating import calibration_of, tolerant
from mindspeed_precision.compare import Policy, default_policy, load_policy, reach_of
from mindspeed_precision.diagnose import (
    First,
    conclude,
    find_causes,
    gather_facts,
    not_repeated,
    plan_refinement,
    prove_by_replay,
)
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.loading import load_run
from mindspeed_precision.msprobe.pairing import beside, default_beside, without_uncaptured
from mindspeed_precision.progress import Progress, silent, watched
from mindspeed_precision.records import Diagnosis, Side


def compare_runs(
    baseline: str | Path | Run,
    candidate: str | Path | Run,
    *,
    policy: str | Policy | None = None,
    mapping: Sequence[str | Path | Mapping] = (),
    calibrate: Sequence[str | Path | Run] = (),
    replay: bool = True,
    progress: Progress = silent,
) -> Diagnosis:
    """Compare two runs, and say where and why they first differ.

    Args:
        baseline: run directory or dump of msprobe, or a run that was loaded; the one to agree with.
        candidate: the same, of the run that is examined.
        policy: what counts as aligned; a name (``exact``), a YAML file, or a loaded policy. None: ``exact``
            for two runs of one framework and one parallel layout, ``cross_framework`` for runs of different
            frameworks, ``cross_layout`` for runs of one framework and different layouts, ``msprobe`` for a
            dump of msprobe and one of our runs.
        mapping: mapping files for what the runs name differently, or loaded ones; applied in order.
        calibrate: runs of the baseline with perturbed parameters (setting ``perturb``): how far they are from
            it bounds the candidate. ``cross_layout`` then stands for the default ``exact``.
        replay: recompute a divergent dW from its captured operands, where torch is installed.
        progress: is told how far loading, aligning, comparing and replaying have come.

    Returns:
        The diagnosis; nothing is written.

    Raises:
        DumpError: a run cannot be read.
        IncomparableError: the runs do not answer the same question.
        ConfigError: there is no such policy, a mapping file is none, or nothing can be calibrated.
    """
    return compare_in_full(
        baseline,
        candidate,
        policy=policy,
        mapping=mapping,
        calibrate=calibrate,
        replay=replay,
        progress=progress,
    ).diagnosis


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A diagnosis and the runs that it is of: what a report is made from.

    Attributes:
        diagnosis: the answer.
        baseline: as it was read.
        candidate: likewise.
        mappings: names and conventions that differ between them.
    """

    diagnosis: Diagnosis
    baseline: Run
    candidate: Run
    mappings: tuple[Mapping, ...] = ()

    @property
    def runs(self) -> dict[Side, Run]:
        """Both runs, by side."""
        return {Side.BASELINE: self.baseline, Side.CANDIDATE: self.candidate}


def compare_in_full(
    baseline: str | Path | Run,
    candidate: str | Path | Run,
    *,
    policy: str | Policy | None = None,
    mapping: Sequence[str | Path | Mapping] = (),
    calibrate: Sequence[str | Path | Run] = (),
    replay: bool = True,
    progress: Progress = silent,
) -> Compared:
    """Do what ``compare_runs`` does, and return with the diagnosis the runs that were read for it."""
    maps = [one if isinstance(one, Mapping) else load_mapping(one) for one in mapping]
    given = [baseline, candidate, *calibrate]
    one, two, *perturbed = (
        run if isinstance(run, Run) else load_run(run)
        for run in watched(given, progress, "loading", len(given))
    )
    one, two = beside(one, two)
    chosen = load_policy(policy) if isinstance(policy, str) else policy
    progress("aligning", 0, None)
    aligned = without_uncaptured(align(one, two, maps))
    if chosen is None:
        chosen = default_beside(one, two) or default_policy(one.framework, two.framework, aligned.layouts)
    calibration = None
    if calibrate:
        chosen = tolerant(chosen, asked=policy is not None)
        start_of = reach_of((one, two), aligned.forced).start_of
        calibration = calibration_of(one, two, perturbed, policy=chosen, mappings=maps, start_of=start_of)
    facts = gather_facts(
        aligned.baseline,
        aligned.candidate,
        aligned,
        policy=chosen,
        calibration=calibration,
        progress=progress,
    )
    findings = find_causes(facts)
    if replay:
        findings = prove_by_replay(facts, findings, progress)
    diagnosis = conclude(facts, [*findings, *not_repeated(one, two)])
    first = {
        side: First(run=run, names=own_names(run, [m for m in maps if m.side_of(one, two) is side]))
        for side, run in ((Side.BASELINE, one), (Side.CANDIDATE, two))
    }
    if not other_tool(one, two):  # settings of ours are none of another tool's
        diagnosis = replace(diagnosis, refinement=plan_refinement(facts, diagnosis, first))
    return Compared(diagnosis=diagnosis, baseline=one, candidate=two, mappings=tuple(maps))
