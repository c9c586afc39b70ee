"""``check RUN``: what must hold in any correct training, from one run alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mindspeed_precision.dump.reader import Run, load_run
from mindspeed_precision.dump.reported import reported_entries, reported_finding
from mindspeed_precision.records import Examination, Finding
from mindspeed_precision.verify.invariants import INVARIANTS
from mindspeed_precision.verify.registry import in_order
from mindspeed_precision.verify.run_facts import RunFacts


def check_run(run: str | Path | Run) -> Examination:
    """Ask every invariant of one run.

    Args:
        run: run directory, or a run that was loaded.

    Returns:
        The findings, the earliest first of those that are errors, and what each check looked at.

    Raises:
        DumpError: the run cannot be read.
    """
    loaded = run if isinstance(run, Run) else load_run(run)
    with np.errstate(all="ignore"):  # runs that overflow are what it is for
        findings, outcomes = INVARIANTS.ask_all(RunFacts(loaded))
    findings = (*findings, *_reported(loaded))
    return Examination(
        command="check",
        subjects={"run": str(loaded.path)},
        findings=tuple(in_order(findings)),
        outcomes=outcomes,
        notes=loaded.notes,
    )


def _reported(run: Run) -> list[Finding]:
    """Return what the run said of itself that nobody who reads its records alone can know: its gaps."""
    told = {str(entry.get("title", "")): entry for entry in reported_entries(run)}
    chosen = [entry for entry in told.values() if str(entry.get("id", "")).startswith("coverage.")]
    return [reported_finding(entry, "the run") for entry in chosen]
