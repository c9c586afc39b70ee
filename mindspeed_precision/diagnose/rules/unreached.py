"""A rule about modules that the backward pass of one run never reaches."""

from __future__ import annotations

from collections.abc import Iterable

from mindspeed_precision.align.ranges import Place, by_itself
from mindspeed_precision.diagnose.facts import Facts, names
from mindspeed_precision.diagnose.rules.registry import rule
from mindspeed_precision.records import Finding, Phase, RecordKey, Role, Severity, Side, Unmatched


@rule("dgrad.missing")
def unreached(facts: Facts) -> Iterable[Finding]:
    """Find modules that both runs went through forward, and that get a gradient in one run alone."""
    forward = {_visit(node.key) for node in facts.graph.all.nodes if _is(node.key, Phase.FPROP, Role.OUTPUT)}
    backward = {
        node.key.step for node in facts.graph.all.nodes if _is(node.key, Phase.DGRAD, Role.GRAD_OUTPUT)
    }
    alone: dict[Side, list[Unmatched]] = {side: [] for side in Side}
    for unmatched in facts.alignment.unmatched:
        key = unmatched.key
        if _is(key, Phase.DGRAD, Role.GRAD_OUTPUT) and _visit(key) in forward and key.step in backward:
            alone[unmatched.side].append(unmatched)
    for side, found in alone.items():
        if found:
            yield _finding(facts, side.other, found)


def _finding(facts: Facts, lacks: Side, found: list[Unmatched]) -> Finding:
    first = min(found, key=lambda unmatched: _when(facts, unmatched))
    after = facts.origins_in(Phase.DGRAD, Role.GRAD_OUTPUT, Role.GRAD_INPUT)
    return Finding(
        id="dgrad.missing",
        severity=Severity.ERROR,
        confidence=0.93,
        title=f"no gradient reaches {first.key.fqn} in the {lacks.value}, whose forward ran in both runs",
        evidence=(
            f"so it is for {names(unmatched.key.fqn for unmatched in found)}",
            f"first: {first.key.describe()}",
        ),
        remedy="look at what uses its output: a branch that is cut off the graph (detach, no_grad, a kernel "
        "in place), an output that nothing adds, a custom backward that returns None",
        where=first.key,
        explains=tuple(origin.key for origin in after if origin.key.step >= first.key.step),
    )


def _when(facts: Facts, unmatched: Unmatched) -> tuple[int, Place]:
    seq = unmatched.record.seq
    return unmatched.key.step, facts.places[unmatched.side, unmatched.rank].get(seq, by_itself(seq))


def _is(key: RecordKey, phase: Phase, role: Role) -> bool:
    return key.phase is phase and key.role is role


def _visit(key: RecordKey) -> tuple[int, int, str, int]:
    """Say which call of which module a record is of."""
    return key.step, key.microbatch, key.fqn, key.occurrence
