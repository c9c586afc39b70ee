"""Two runs compared twice: with every rank in memory, and folded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed_precision.engines import Resources
from mindspeed_precision.flow import Compared, compare_in_full
from mindspeed_precision.fold.deciding import PER_BYTE
from mindspeed_precision.report.verdict_json import verdict_text


def smallest(*runs: Path) -> int:
    """Return the most memory with which two runs are folded; every rank may be kept in it."""
    return int(sum(file.stat().st_size for run in runs for file in run.rglob("index.jsonl")) * PER_BYTE) - 1


def folded(one: Path, two: Path, **resources: Any) -> Compared:
    """Compare two runs, folded."""
    chosen = Resources(**{"memory": smallest(one, two), "jobs": 1, **resources})
    found = compare_in_full(one, two, resources=chosen)
    assert found.folded is not None, found.note
    return found


def told(compared: Compared) -> str:
    """Return the whole answer: verdict.json, the settings of a second pass among it."""
    refinement = compared.diagnosis.refinement
    settings = "" if refinement is None else repr(refinement)
    return verdict_text(compared.diagnosis, config="refine.yaml") + settings
