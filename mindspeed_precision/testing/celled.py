"""One run checked twice: with every rank in memory, and in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed_precision.dump.format import INDEX
from mindspeed_precision.engines import Resources
from mindspeed_precision.records import Examination
from mindspeed_precision.verify.cells.plan import needed
from mindspeed_precision.verify.check import check_run
from mindspeed_precision.verify.invariants import INVARIANTS


def smallest(run: Path) -> int:
    """Return the most memory with which a run is checked in parts."""
    return needed(run) - 1


def by_rank(run: Path) -> int:
    """Return memory for the largest rank of a run, and no replica of several."""
    size = max(index.stat().st_size for index in run.glob(f"rank*/{INDEX}"))
    return needed(run) * size // sum(index.stat().st_size for index in run.glob(f"rank*/{INDEX}")) + 1


def in_cells(run: Path, **resources: Any) -> Examination:
    """Check a run in parts."""
    found = check_run(run, resources=Resources(**{"memory": smallest(run), "jobs": 1, **resources}))
    assert found.notes[0].startswith("checked in parts"), found.notes
    return found


def in_memory(run: Path) -> Examination:
    """Check a run with every rank in memory."""
    return check_run(run, resources=Resources(memory=1 << 60, jobs=1))


def left_out(answer: Examination) -> frozenset[str]:
    """Return the ids of the checks that memory was too small for."""
    names = {one.name for one in answer.outcomes if "--memory" in one.skipped}
    return frozenset(id_ for check in INVARIANTS if check.ids[0] in names for id_ in check.ids)


def said(answer: Examination, *, but: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return what an answer says, in whichever way it was made.

    Args:
        answer: of ``check``.
        but: ids of checks of which nothing is asked.
    """
    return {
        "findings": sorted(
            (one.id, one.severity.value, repr(one.where), one.title, one.remedy)
            for one in answer.findings
            if one.id not in but
        ),
        "outcomes": [
            (one.name, one.exercised, one.failed, one.applies)
            for one in answer.outcomes
            if one.name not in but
        ],
        "notes": [note for note in answer.notes if not note.startswith("checked in parts")],
    }
