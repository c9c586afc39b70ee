"""Loss and grad norm of both runs by step: what a user reads in the log."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mindspeed_precision.diagnose.facts import Facts
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.records import NO_MICROBATCH, Phase, RecordKey, Role, StepScalars


def step_scalars(facts: Facts) -> tuple[StepScalars, ...]:
    """Return loss and grad norm of every compared step; None where a run did not record it.

    The loss is what the log prints (the record of the whole step), from the first rank that has it; where
    there is none, the mean over the first rank's microbatches.
    """
    ranks, steps = facts.alignment.ranks, facts.alignment.steps
    one, two = (scalars_of(run, ranks) for run in (facts.baseline, facts.candidate))
    tolerated = _tolerated(facts)
    return tuple(
        StepScalars(
            step=step,
            baseline_loss=one[0].get(step),
            candidate_loss=two[0].get(step),
            baseline_grad_norm=one[1].get(step),
            candidate_grad_norm=two[1].get(step),
            tolerated=tuple(name for name in ("loss", "grad_norm") if tolerated.get((step, name))),
        )
        for step in steps
    )


def _tolerated(facts: Facts) -> dict[tuple[int, str], bool]:
    """Tell of which steps the loss and the norm agree within the policy, wherever they were compared."""
    agree: dict[tuple[int, str], bool] = {}
    for node in facts.graph.all.nodes:
        key = node.key
        if key.role is Role.LOSS or (key.role is Role.GRAD_NORM and key.slot == ""):
            name = (key.step, "loss" if key.role is Role.LOSS else "grad_norm")
            agree[name] = agree.get(name, True) and not node.diverges
    return agree


def scalars_of(run: Run, ranks: Sequence[int]) -> tuple[dict[int, float], dict[int, float]]:
    """Return by step the loss and the grad norm that a run recorded on some ranks."""
    losses: dict[int, float] = {}
    norms: dict[int, float] = {}
    parts: dict[int, list[float]] = {}
    for rank in ranks:
        of_rank: dict[int, list[float]] = {}
        for record in run.ranks[rank].records:
            key, value = record.key, record.value
            if value is None:
                continue
            if _is_printed_loss(key):
                losses.setdefault(key.step, value)
            elif key.phase is Phase.LOSS and key.microbatch != NO_MICROBATCH and key.slot == "":
                of_rank.setdefault(key.step, []).append(value)
            elif key.role is Role.GRAD_NORM and key.slot == "":
                norms.setdefault(key.step, value)
        for step, values in of_rank.items():
            parts.setdefault(step, values)
    for step, values in parts.items():
        losses.setdefault(step, math.fsum(values) / len(values))
    return losses, norms


def _is_printed_loss(key: RecordKey) -> bool:
    return key.phase is Phase.LOSS and key.microbatch == NO_MICROBATCH


def loss_error(scalars: Sequence[StepScalars]) -> float | None:
    """Return the mean over the steps of the loss's relative error; None where no step has both losses."""
    errors = []
    for row in scalars:
        if row.baseline_loss is not None and row.candidate_loss is not None:
            error = abs(row.candidate_loss - row.baseline_loss)
            errors.append(error / abs(row.baseline_loss) if error and row.baseline_loss else error)
    return math.fsum(errors) / len(errors) if errors else None
