"""Rules about operations that give another result from the same inputs: forward, loss, backward."""

from __future__ import annotations

from collections.abc import Iterable

from mindspeed_precision.diagnose.facts import Facts, concerns, reason
from mindspeed_precision.diagnose.rules.registry import rule
from mindspeed_precision.records import Finding, Origin, Phase, Role, Severity, Verdict


@rule("fprop.value", "dgrad.value", "fprop.loss")
def values(facts: Facts) -> Iterable[Finding]:
    """Name the operations whose result differs although nothing that they consumed does.

    That is where, and no more than a hint why: the confidence is low, a rule that knows a cause ranks above.
    """
    for id_, origins, what, remedy in (
        (
            "fprop.value",
            facts.origins_in(Phase.FPROP, Role.OUTPUT),
            "the forward pass of {} gives another output from the same inputs and parameters",
            "compare its implementation in both runs: fusion, kernel, dtype, dropout and random state",
        ),
        (
            "dgrad.value",
            facts.origins_in(Phase.DGRAD, Role.GRAD_INPUT),
            "the backward pass of {} gives another gradient of its input from the same gradient "
            "of its output",
            "compare its backward implementation: fusion, kernel, dtype, missing or doubled collectives",
        ),
        (
            "fprop.loss",
            facts.origins_in(Phase.LOSS, Role.LOSS),
            "{} differs although the model's outputs and the labels do not",
            "compare the loss function: mask, normalisation, dtype, reduction over microbatches and ranks",
        ),
    ):
        if origins:
            yield _finding(id_, origins, what, remedy)


def _finding(id_: str, origins: list[Origin], what: str, remedy: str) -> Finding:
    first = origins[0]
    return Finding(
        id=id_,
        severity=Severity.ERROR,
        confidence=0.5,
        title=what.format(first.key.fqn or "the model"),
        evidence=(first.inputs, *reason(first), *concerns(origins)),
        remedy=remedy,
        where=first.key,
        explains=tuple(origin.key for origin in origins),
    )


@rule("layout.kind_differs")
def kinds(facts: Facts) -> Iterable[Finding]:
    """Find records that have another shape or dtype: the runs do not compute the same thing there."""
    origins = [origin for origin in facts.origins if origin.comparison.verdict is Verdict.INCOMPARABLE]
    if origins:
        first = origins[0]
        yield Finding(
            id="layout.kind_differs",
            severity=Severity.ERROR,
            confidence=0.85,
            title=f"{first.key.fqn or '(model)'} {first.key.role.value} has another shape or dtype",
            evidence=(first.comparison.reason, *concerns(origins)),
            remedy="compare the configuration of both runs: dtypes, sequence length, microbatch "
            "size, padding",
            where=first.key,
            explains=tuple(origin.key for origin in origins),
        )
