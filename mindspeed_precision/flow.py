"""Two run directories in, one diagnosis out: the offline half, as one reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mindspeed_precision.align import Mapping, align, load_mapping, own_names
from mindspeed_precision.align.compatible import other_tool
from mindspeed_precision.calibrating import calibration_of, tolerant
from mindspeed_precision.compare import DEFAULT_POLICY, Policy, default_policy, load_policy, reach_of
from mindspeed_precision.diagnose import (
    First,
    conclude,
    find_causes,
    gather_facts,
    not_repeated,
    plan_refinement,
    prove_by_replay,
)
from mindspeed_precision.diagnose.facts import Facts
from mindspeed_precision.dump.object_store import local_directory
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.engines import Resources
from mindspeed_precision.fold.deciding import LAYOUTS_DIFFER, needs_folding, why_not
from mindspeed_precision.fold.folding import Folded, fold_runs
from mindspeed_precision.fold.left_out import not_linked
from mindspeed_precision.loading import load_run
from mindspeed_precision.msprobe.pairing import beside, default_beside, without_uncaptured
from mindspeed_precision.progress import Progress, silent, watched
from mindspeed_precision.records import Diagnosis, Finding, Side, Verdict


def compare_runs(
    baseline: str | Path | Run,
    candidate: str | Path | Run,
    *,
    policy: str | Policy | None = None,
    mapping: Sequence[str | Path | Mapping] = (),
    calibrate: Sequence[str | Path | Run] = (),
    replay: bool = True,
    resources: Resources | None = None,
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
        resources: memory and workers; runs that memory does not hold are folded (``fold``). None: 2 GiB, and
            no other process, since those import the caller's main module.
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
        resources=resources,
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
        folded: for which ranks others stand; None: every rank was loaded.
        note: why runs that memory does not hold were not folded; empty where they were, or fit.
    """

    diagnosis: Diagnosis
    baseline: Run
    candidate: Run
    mappings: tuple[Mapping, ...] = ()
    folded: Folded | None = None
    note: str = ""

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
    resources: Resources | None = None,
    progress: Progress = silent,
) -> Compared:
    """Do what ``compare_runs`` does, and return with the diagnosis the runs that were read for it."""
    maps = [one if isinstance(one, Mapping) else load_mapping(one) for one in mapping]
    chosen = load_policy(policy) if isinstance(policy, str) else policy
    folded, note = None, ""
    baseline, candidate = (
        run if isinstance(run, Run) else local_directory(run) for run in (baseline, candidate)
    )
    if not isinstance(baseline, Run) and not isinstance(candidate, Run):
        simple = not maps and not calibrate
        folded, note = _folded(
            baseline, candidate, chosen, resources or Resources(jobs=1), progress, simple=simple
        )
    given: list[str | Path | Run] = [*(folded.runs if folded else (baseline, candidate)), *calibrate]
    one, two, *perturbed = (
        run if isinstance(run, Run) else load_run(run)
        for run in watched(given, progress, "loading", len(given))
    )
    one, two = beside(one, two)
    progress("aligning", 0, None)
    aligned = without_uncaptured(align(one, two, maps, stand_ins=folded.stand_ins if folded else None))
    if folded and aligned.layouts:  # shards of all ranks make one tensor: none can stand for others
        loaded = [load_run(run.path) for run in folded.runs]
        found = compare_in_full(*loaded, policy=chosen, replay=replay, progress=progress)
        return replace(found, note=f"{_LOADED}: {LAYOUTS_DIFFER} ({' against '.join(aligned.layouts)})")
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
        recorded=folded.whole if folded else (),
        progress=progress,
    )
    findings = find_causes(facts)
    if replay:
        findings = prove_by_replay(facts, findings, progress)
    recorded = folded.whole if folded else (one, two)
    diagnosis = _concluded(facts, [*findings, *not_repeated(*recorded)], folded)
    first = {
        side: First(run=whole, names=own_names(run, [m for m in maps if m.side_of(one, two) is side]))
        for side, run, whole in zip(Side, (one, two), recorded, strict=True)
    }
    if not other_tool(one, two):  # settings of ours are none of another tool's
        diagnosis = replace(diagnosis, refinement=plan_refinement(facts, diagnosis, first))
    return Compared(
        diagnosis=diagnosis, baseline=one, candidate=two, mappings=tuple(maps), folded=folded, note=note
    )


def _concluded(facts: Facts, findings: Sequence[Finding], folded: Folded | None) -> Diagnosis:
    """Conclude; where ranks were left out that differ, it is not known whether the runs agree."""
    more, notes = not_linked(folded) if folded else ([], [])
    diagnosis = conclude(facts, [*findings, *more])
    diagnosis = replace(diagnosis, notes=(*diagnosis.notes, *notes))
    if more and diagnosis.status in (Verdict.IDENTICAL, Verdict.WITHIN_TOLERANCE):
        return replace(diagnosis, status=Verdict.MISSING)
    return diagnosis


_LOADED = "the runs are larger than --memory allows, and every rank was loaded"


def _folded(
    baseline: Path,
    candidate: Path,
    policy: Policy | None,
    resources: Resources,
    progress: Progress,
    *,
    simple: bool,
) -> tuple[Folded | None, str]:
    """Fold two runs that memory does not hold; else None, with the reason where it is not their size."""
    paths = baseline, candidate
    if not needs_folding(paths, resources):
        return None, ""
    reason = why_not(paths) if simple else "with a mapping or a calibration every record is judged by itself"
    exact = policy or load_policy(DEFAULT_POLICY)
    if not reason and not exact.exact:
        reason = f"policy {exact.name} judges every record by itself"
    if reason:
        return None, f"{_LOADED}: {reason}"
    return fold_runs(*paths, policy=exact, resources=resources, progress=progress), ""
