"""A rule about dW that was recorded where it is added up, and not where it is computed: dumps of msprobe."""

from __future__ import annotations

from collections.abc import Iterable

from mindspeed_precision.diagnose.facts import (
    Facts,
    concerns,
    describe_factor,
    reason,
    scale_of,
)
from mindspeed_precision.diagnose.rules.registry import rule
from mindspeed_precision.records import Finding, Origin, Phase, Role, Severity


@rule("wgrad.seen_in_main_grad")
def seen_in_main_grad(facts: Facts) -> Iterable[Finding]:
    """Find main_grad that differs where neither dW nor what it was added to were recorded by both runs."""
    origins = [origin for origin in _after(facts) if dw_unseen(facts, origin)]
    if not origins:
        return
    first = origins[0]
    scale = scale_of(first.comparison)
    factor = () if scale is None else (f"candidate = {describe_factor(facts, scale.factor)} × baseline",)
    yield Finding(
        id="wgrad.seen_in_main_grad",
        severity=Severity.ERROR,
        confidence=0.7,
        title=f"dW of {first.key.fqn}, or how it is added up, is another: its sum differs, and what it is "
        "computed from agrees",
        evidence=(*factor, first.inputs, *reason(first), *concerns(origins)),
        remedy="record dW itself: with msprobe at level mix, or both runs with this tool, which also keeps "
        "the operands of its GEMM",
        where=first.key,
        explains=tuple(origin.key for origin in origins),
    )


def _after(facts: Facts) -> list[Origin]:
    return [o for o in facts.origins_in(Phase.ACCUMULATE, Role.MAIN_GRAD) if o.key.slot == "after"]


def dw_unseen(facts: Facts, origin: Origin) -> bool:
    """Tell whether no dW and no sum before it is among what both runs recorded of an accumulation."""
    consumed = facts.graph.consumed(facts.node_of(origin))
    return not any(
        node.key.phase is Phase.WGRAD or (node.key.phase is Phase.ACCUMULATE and node.key.slot == "before")
        for node in consumed
    )
