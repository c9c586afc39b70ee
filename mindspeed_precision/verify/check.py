"""``check RUN``: what must hold in any correct training, from one run alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mindspeed_precision.dump.object_store import local_directory
from mindspeed_precision.dump.reader import Run, load_run
from mindspeed_precision.dump.reported import reported_entries, reported_finding
from mindspeed_precision.engines import Resources
from mindspeed_precision.progress import Progress, silent
from mindspeed_precision.records import CheckOutcome, Examination, Finding
from mindspeed_precision.verify.cells.lead import check_in_cells
from mindspeed_precision.verify.cells.plan import needs_cells, why_not
from mindspeed_precision.verify.invariants import INVARIANTS
from mindspeed_precision.verify.registry import in_order
from mindspeed_precision.verify.run_facts import RunFacts


def check_run(
    run: str | Path | Run, *, resources: Resources | None = None, progress: Progress = silent
) -> Examination:
    """Ask every invariant of one run.

    Args:
        run: run directory or its URL, or a run that was loaded.
        resources: memory and workers; a directory that memory does not hold is checked in parts
            (``verify.cells``). None: 2 GiB, and this process alone.
        progress: is told how far a run is that is checked in parts.

    Returns:
        The findings, the earliest first of those that are errors, and what each check looked at.

    Raises:
        DumpError: the run cannot be read.
        PrecisionError: workers died again and again.
    """
    if isinstance(run, Run):
        return _in_memory(run)
    limits, path = resources or Resources(jobs=1), local_directory(run)
    if not needs_cells(path, limits):
        return _in_memory(load_run(path))
    reason = why_not(path)
    if reason:
        told = f"the run was loaded whole, whatever --memory says: {reason}"
        return _in_memory(load_run(path), told)
    checked = check_in_cells(path, limits, progress)
    return _examination(checked.run, checked.findings, checked.outcomes, checked.told)


def _in_memory(run: Run, *told: str) -> Examination:
    with np.errstate(all="ignore"):  # runs that overflow are what it is for
        findings, outcomes = INVARIANTS.ask_all(RunFacts(run))
    return _examination(run, findings, outcomes, *told)


def _examination(
    run: Run, findings: Sequence[Finding], outcomes: tuple[CheckOutcome, ...], *told: str
) -> Examination:
    return Examination(
        command="check",
        subjects={"run": str(run.path)},
        findings=tuple(in_order((*findings, *_reported(run)))),
        outcomes=outcomes,
        notes=(*told, *run.notes),
    )


def _reported(run: Run) -> list[Finding]:
    """Return what the run said of itself that nobody who reads its records alone can know: its gaps."""
    told = {str(entry.get("title", "")): entry for entry in reported_entries(run)}
    chosen = [entry for entry in told.values() if str(entry.get("id", "")).startswith("coverage.")]
    return [reported_finding(entry, "the run") for entry in chosen]
