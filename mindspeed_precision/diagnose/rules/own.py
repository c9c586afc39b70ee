"""Gradients that break a law that the other run keeps, whatever their inputs do."""

from __future__ import annotations

from collections.abc import Iterable

from mindspeed_precision.diagnose.facts import Facts, concerns
from mindspeed_precision.diagnose.rules.registry import rule
from mindspeed_precision.records import Finding, Origin, Phase, Severity


@rule("wgrad.own_fault", "reduce.own_fault")
def own_fault(facts: Facts) -> Iterable[Finding]:
    """Report gradients with a fault of their own, which another divergence would have hidden."""
    for phase in (Phase.WGRAD, Phase.REDUCE):
        origins = [origin for origin in facts.origins if origin.own and origin.key.phase is phase]
        if origins:
            yield _finding(f"{phase.value}.own_fault", origins)


def _finding(id_: str, origins: list[Origin]) -> Finding:
    first = origins[0]
    what = "the reduced gradient" if first.key.phase is Phase.REDUCE else "dW"
    return Finding(
        id=id_,
        severity=Severity.ERROR,
        confidence=0.85,
        title=f"{what} of {first.key.fqn} has a fault of its own, beside what its inputs carry into it",
        evidence=(first.own, first.inputs, *concerns(origins)),
        remedy="look at what makes this gradient and at what happens to it on its way; mending the other "
        "cause will not mend it",
        where=first.key,
        explains=tuple(origin.key for origin in origins),
    )
