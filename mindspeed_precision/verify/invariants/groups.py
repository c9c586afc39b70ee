"""Every trainable parameter is in one parameter group of the optimizer, once."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_precision.counting import count
from mindspeed_precision.records import Finding, Phase, RecordKey, Role, Severity
from mindspeed_precision.verify.group_table import ParameterRow, parameter_rows
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import whole_run

_SHOWN = 12


@invariant(
    "optimizer.parameter_in_no_group",
    "optimizer.parameter_twice",
    holds="every trainable parameter is in one parameter group of the optimizer, once",
    unit="trainable parameters",
    span=[whole_run(effective=True)],
)
def groups(facts: RunFacts) -> Answer:
    """Look for parameters that no optimizer has, or that one has twice, over all ranks."""
    if not any(rank.effective.get("groups") for rank in facts.ranks.values()):
        return Answer(exercised=0, skipped="the run did not record the groups of its optimizer")
    rows = [row for row in parameter_rows(facts.run).values() if row.trainable]
    findings = []
    alone = [row for row in rows if not row.grouped]
    if alone:
        missing = _missing_ranks(facts)
        if missing:
            return Answer(
                exercised=0, skipped=f"{count(missing, 'rank')} did not record: theirs may hold the others"
            )
        findings.append(
            _finding(
                "optimizer.parameter_in_no_group",
                f"{len(alone)} trainable parameters are in no group: they are never updated",
                alone,
                "build the optimizer after the last parameter exists, and over the whole model",
            )
        )
    twice = [row for row in rows if row.times > 1]
    if twice:
        findings.append(
            _finding(
                "optimizer.parameter_twice",
                f"{count(len(twice), 'parameter', 'are')} in a group more than once: "
                "each step updates them again",
                twice,
                "make the conditions of the groups exclude each other; give a tied weight once",
            )
        )
    return Answer(exercised=len(rows), findings=tuple(findings), failed=len(alone) + len(twice))


def _missing_ranks(facts: RunFacts) -> int:
    size = max(rank.coordinates.world_size for rank in facts.ranks.values())
    return size - len(facts.ranks)


def _finding(id_: str, title: str, rows: Sequence[ParameterRow], remedy: str) -> Finding:
    names = [row.fqn for row in rows]
    more = [f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return Finding(
        id=id_,
        severity=Severity.ERROR,
        confidence=0.95,
        title=title,
        evidence=(*names[:_SHOWN], *more),
        remedy=remedy,
        where=RecordKey(step=0, phase=Phase.OPTIMIZER, fqn=names[0], role=Role.PARAM),
    )
