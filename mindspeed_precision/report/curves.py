"""Loss and grad norm of both runs over every step that either recorded, few enough to draw."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindspeed_precision.diagnose.scalars import scalars_of
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.records import NO_MICROBATCH, Diagnosis, Side, StepScalars

MOST_POINTS = 2000


@dataclass(frozen=True, kw_only=True)
class Curves:
    """What both logs say.

    Attributes:
        rows: by step, ascending; None for what a run did not record.
        each: of so many steps the one with the largest difference is kept; 1: all are.
    """

    rows: tuple[StepScalars, ...]
    each: int = 1


def curves_of(diagnosis: Diagnosis, runs: Mapping[Side, Run]) -> Curves:
    """Return the compared steps, and of those that were not compared what the runs' own logs say.

    A loss that a run did not print is the mean over one rank's microbatches and is not put beside another
    run's where the steps were not compared.
    """
    rows = {row.step: row for row in diagnosis.scalars}
    printed = {side: _printed(run) for side, run in runs.items()}
    for step in sorted({step for found in printed.values() for kind in found for step in kind} - rows.keys()):
        values = [found[kind].get(step) for kind in (0, 1) for found in printed.values()]
        rows[step] = StepScalars(
            step=step,
            baseline_loss=values[0],
            candidate_loss=values[1],
            baseline_grad_norm=values[2],
            candidate_grad_norm=values[3],
        )
    return _thinned([rows[step] for step in sorted(rows)])


def _printed(run: Run) -> tuple[dict[int, float], dict[int, float]]:
    whole = {
        r.key.step for rank in run.ranks.values() for r in rank.records if r.key.microbatch == NO_MICROBATCH
    }
    losses, norms = scalars_of(run, tuple(run.ranks))
    return {step: value for step, value in losses.items() if step in whole}, norms


def _thinned(rows: Sequence[StepScalars]) -> Curves:
    each = -(-len(rows) // MOST_POINTS) or 1
    groups = (rows[start : start + each] for start in range(0, len(rows), each))
    return Curves(rows=tuple(max(group, key=_apart) for group in groups), each=each)


def _apart(row: StepScalars) -> float:
    one, two = row.baseline_loss, row.candidate_loss
    if one is None or two is None:
        return -1.0
    apart = abs(two - one)
    return math.inf if math.isnan(apart) else apart
