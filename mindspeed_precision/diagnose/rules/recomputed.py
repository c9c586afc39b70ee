"""A rule about activations that the backward pass computes once more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mindspeed_precision.diagnose.facts import Facts, concerns
from mindspeed_precision.diagnose.rules.registry import rule
from mindspeed_precision.records import Finding, Origin, Phase, Severity, Side, Verdict


@rule("fprop.recomputed_differs")
def recomputed_differs(facts: Facts) -> Iterable[Finding]:
    """Find activations that one run recomputes otherwise than its own forward pass had them."""
    for number, side in enumerate(Side):
        origins = [origin for origin in facts.origins if _differs(facts, origin, number)]
        if origins:
            first = origins[0]
            yield Finding(
                id="fprop.recomputed_differs",
                severity=Severity.ERROR,
                confidence=0.96,
                title=f"the {side.value} recomputes {first.key.fqn or 'the model'} in its backward pass "
                "otherwise than it computed it in its forward pass",
                evidence=(
                    f"the {side.other.value} has the bits of its forward pass again",
                    first.inputs,
                    *concerns(origins),
                ),
                remedy="look at what the recomputation reads beside its saved inputs: random state, globals "
                "that later microbatches change, the context of mixed precision",
                where=first.key,
                explains=tuple(origin.key for origin in origins),
            )


def _differs(facts: Facts, origin: Origin, side: int) -> bool:
    """Tell whether that side alone has other bits than in its forward pass; what is unknown is no."""
    key = origin.key
    if (
        key.phase is not Phase.FPROP
        or not key.recomputed
        or origin.comparison.verdict is not Verdict.DIVERGED
    ):
        return False
    again = facts.node_of(origin).bits
    node = facts.nodes.get((origin.ranks[0], replace(key, recomputed=False)))
    first = node.bits if node is not None else None
    return (
        again is not None
        and first is not None
        and again[side] != first[side]
        and again[1 - side] == first[1 - side]
    )
