"""Numbers and switches that modules hold: epsilons, scales, probabilities, dtypes of tables."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from mindspeed_precision.records import Finding, Phase, RecordKey, Role, Severity, Side
from mindspeed_precision.verify.pair.evidence import listed, shortened
from mindspeed_precision.verify.pair.registry import pair_check
from mindspeed_precision.verify.pair_facts import PairFacts
from mindspeed_precision.verify.registry import Answer

DECIDES = frozenset(
    {
        "eps", "epsilon", "variance_epsilon", "p", "scale", "softmax_scale", "norm_factor", "coeff",
        "hidden_dropout", "attention_dropout", "rotary_interleaved", "rotary_percent", "rotary_base",
        "zero_centered_gamma", "softmax_in_fp32", "inv_freq", "elementwise_affine", "interleaved", "base",
    }
)  # fmt: skip
"""Attributes that take part in a module's function; others are compared, and may not decide numbers."""

Held = dict[tuple[str, str], set[str]]
"""By module (layers as ``*``) and attribute, the values that modules of the run hold."""


@pair_check(
    "model.module_differs",
    holds="modules of one name hold the same numbers and switches before the first step",
    unit="attributes of modules",
)
def modules(facts: PairFacts) -> Answer:
    """Compare what live modules hold; of other layouts and frameworks only what decides their function."""
    held = {side: _held(facts, side) for side in Side}
    one, two = held[Side.BASELINE], held[Side.CANDIDATE]
    silent = [side.value for side in Side if not held[side]]
    if silent:
        return Answer(exercised=0, skipped=f"the {silent[0]} did not record what its modules hold")
    only = facts.foreign or bool(facts.other_layout)
    common = [place for place in one if place in two and (not only or place[1] in DECIDES)]
    apart = [place for place in common if one[place] != two[place]]
    findings = []
    for severity in (Severity.ERROR, Severity.WARNING):
        found = [place for place in apart if (place[1] in DECIDES) == (severity is Severity.ERROR)]
        if found:
            lines = [
                f"{fqn or '(model)'}.{name}: {_text(one[fqn, name])} in the baseline, "
                f"{_text(two[fqn, name])} in the candidate"
                for fqn, name in found
            ]
            findings.append(_finding(severity, found, lines))
    return Answer(exercised=len(common), findings=tuple(findings), failed=len(apart))


def _held(facts: PairFacts, side: Side) -> Held:
    found: Held = defaultdict(set)
    names = facts.names[side]
    for rank in facts.run(side).ranks.values():
        for module in rank.effective.get("modules", ()):
            fqn = names.get(module["fqn"], module["fqn"])
            for name, value in module["values"].items():
                found[fqn, name].add(_comparable(value))
    return dict(found)


def _comparable(value: Any) -> str:
    return f"{float(value):.9g}" if isinstance(value, float) else str(value)


def _text(values: set[str]) -> str:
    return " and ".join(sorted(values))


def _finding(severity: Severity, places: list[tuple[str, str]], lines: list[str]) -> Finding:
    fqn = places[0][0]
    return Finding(
        id="model.module_differs",
        severity=severity,
        confidence=0.9 if severity is Severity.ERROR else 0.4,
        title=f"modules hold other values: {listed([f'{fqn}.{name}' for fqn, name in places], 3)}",
        evidence=shortened(lines),
        remedy="find who sets it: an argument that is not handed on, a default of another implementation",
        where=RecordKey(step=0, phase=Phase.FPROP, fqn=fqn, role=Role.OUTPUT),
    )
