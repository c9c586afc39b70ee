"""What several ranks hold alike: parameters, reduced gradients, optimizer states, whole activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mindspeed_precision.align.merging import BEFORE_REDUCTION
from mindspeed_precision.align.replicas import kept_equal_by, replicas_of
from mindspeed_precision.counting import count
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.records import (
    Finding,
    Phase,
    RecordKey,
    ReplicasDiffer,
    Role,
    Severity,
    TensorRecord,
)
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts


@invariant(
    "parallel.replicas_differ",
    holds="what several ranks hold a copy of (over TP, over DP after the reduction, tied over PP) is equal",
    unit="tensors with copies",
)
def replicas_differ(facts: RunFacts) -> Answer:
    """Name the first tensor whose copies are none, and how many follow."""
    if len(facts.ranks) == 1:
        alone = next(iter(facts.ranks.values())).coordinates.world_size == 1
        return Answer(exercised=0, applies=not alone, skipped="" if alone else "one rank alone was recorded")
    late = bool(facts.config.get("ddp_config", {}).get("overlap_param_gather")) and _has_late(facts.run)
    found = replicas_of(_without_late(facts.run) if late else facts.run)
    skipped = "" if found.compared else "no tensor is known to have a copy on another rank"
    if late:
        skipped = "not parameters after a step: the next forward pass gathers them (overlap_param_gather)"
    failed = len(found.differing)
    findings = (_finding(found.differing),) if failed else ()
    return Answer(exercised=found.compared, failed=failed, findings=findings, skipped=skipped)


def _has_late(run: Run) -> bool:
    """Tell whether each rank recorded all parameters whole after a step, and not what it updated alone."""
    return all(
        {record.key.fqn for record in rank.records if _is_late(record)} >= {p.fqn for p in rank.parameters}
        for rank in run.ranks.values()
    )


def _without_late(run: Run) -> Run:
    """Leave out whole parameters as an optimizer leaves them whose gather is still to come."""
    ranks = {
        number: replace(rank, records=tuple(r for r in rank.records if not _is_late(r)))
        for number, rank in run.ranks.items()
    }
    return replace(run, ranks=ranks)


def _is_late(record: TensorRecord) -> bool:
    """Tell whether it is a whole parameter after a step."""
    return record.key.phase is Phase.OPTIMIZER and record.key.role is Role.PARAM and record.part is None


def _first(found: Sequence[ReplicasDiffer]) -> tuple[ReplicasDiffer, str]:
    """Return the first difference that is one, and a word on what was before it.

    Where dW of a parameter differs, and nothing that it was computed from does, the ranks have parts of a
    sum: it is the reduction that is missing.
    """
    first = found[0]
    if first.key.phase in BEFORE_REDUCTION:
        reduced = [
            one
            for one in found
            if (one.key.step, one.key.fqn, one.key.role) == (first.key.step, first.key.fqn, Role.REDUCED_GRAD)
        ]
        if reduced:
            return reduced[0], "dW of the ranks are parts of a sum: what they were computed from agrees"
    return first, ""


def _finding(found: Sequence[ReplicasDiffer]) -> Finding:
    first, before = _first(found)
    groups = " and ".join(f"ranks {', '.join(map(str, ranks))}" for ranks in first.ranks)
    return Finding(
        id="parallel.replicas_differ",
        severity=Severity.ERROR,
        confidence=0.97,
        title=f"{first.key.fqn or '(model)'}: the copies of {_what(first.key)} on different ranks differ",
        evidence=(
            f"first: {first.key.describe()}",
            f"{groups} hold different bits",
            *([before] if before else []),
            f"{count(len(found), 'record')} in all, of {len({one.key.fqn for one in found})} names",
        ),
        remedy=kept_equal_by(first.key.phase),
        where=first.key,
    )


def _what(key: RecordKey) -> str:
    return f"{key.role.value}[{key.slot}]" if key.slot else key.role.value
