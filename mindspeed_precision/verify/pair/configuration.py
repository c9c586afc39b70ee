"""The effective configuration of two runs, argument by argument, by what each means for numerics."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_precision.meanings import Effect, Meaning, load_meanings
from mindspeed_precision.records import Finding, Severity, Side
from mindspeed_precision.verify.pair.evidence import by_severity, shortened
from mindspeed_precision.verify.pair.judges import JUDGES
from mindspeed_precision.verify.pair.registry import pair_check
from mindspeed_precision.verify.pair_facts import PairFacts
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.settings import Difference, differences

_JUDGED = {
    "schedule": "every step's learning rate, weight decay and batch size are the same",
    "data": "the batches of all recorded steps are the same",
    "weights": "the weights before the first step are the same",
}


@pair_check(
    "config.differs",
    "config.unknown_argument",
    holds="no argument that decides numbers differs",
    unit="arguments",
)
def configuration(facts: PairFacts) -> Answer:
    """Compare Megatron's arguments, and the configuration objects that model and optimizer really use."""
    looked, judged = judged_differences(facts)
    lines = [(one.severity, one.difference.line(one.reason)) for one in judged if one.severity is not None]
    unknown = [one.difference.line("") for one in judged if one.severity is None]
    remedy = "make the arguments equal, or know why they are not"
    findings = list(by_severity("config.differs", "arguments", lines, remedy))
    if unknown:
        findings.append(_unknown(unknown))
    skipped = "" if looked else _silent(facts)
    bad = sum(severity is not Severity.INFO for severity, _ in lines) + len(unknown)
    return Answer(exercised=looked, findings=tuple(findings), failed=bad, skipped=skipped)


@dataclass(frozen=True, kw_only=True)
class JudgedDifference:
    """A name with two values, and what that means.

    Attributes:
        difference: the values.
        severity: how bad it is; None: the name is in no table of meanings.
        reason: why, in one line.
    """

    difference: Difference
    severity: Severity | None
    reason: str = ""


def judged_differences(facts: PairFacts) -> tuple[int, tuple[JudgedDifference, ...]]:
    """Return how many names both runs give a value, and those that differ with what each means."""
    looked, found = differences(*(facts.settings[side] for side in Side))
    return looked, tuple(_judged(facts, difference) for difference in found)


def _judged(facts: PairFacts, difference: Difference) -> JudgedDifference:
    meaning = load_meanings().argument(difference.name)
    if meaning is None:
        return JudgedDifference(difference=difference, severity=None)
    severity, reason = _judge(facts, meaning)
    return JudgedDifference(difference=difference, severity=severity, reason=reason)


def _silent(facts: PairFacts) -> str:
    dumb = [side.value for side in Side if not facts.settings[side].sections]
    if dumb:
        return (
            f"the {' and the '.join(dumb)} did not record a configuration: give its file (--{dumb[0]}-config)"
        )
    return "no argument is known of both runs"


def _judge(facts: PairFacts, meaning: Meaning) -> tuple[Severity, str]:
    """Return how bad a difference is; what an argument does, where that was compared, counts before it."""
    severity, reason = meaning.effect.severity, meaning.reason
    if meaning.judged_by == "layout" and facts.other_layout:
        return _no_worse(severity, Severity.WARNING), f"{reason} (the layouts differ)"
    judge = JUDGES.get(meaning.judged_by)
    same = None if judge is None or meaning.effect is Effect.CANNOT else judge(facts)
    if same:
        return Severity.INFO, f"{reason}; but {_JUDGED[meaning.judged_by]}"
    return severity, reason


def _no_worse(severity: Severity, most: Severity) -> Severity:
    order = list(Severity)
    return order[max(order.index(severity), order.index(most))]


def _unknown(lines: list[str]) -> Finding:
    return Finding(
        id="config.unknown_argument",
        severity=Severity.WARNING,
        confidence=0.4,
        title=f"{len(lines)} different arguments that are not in the table of meanings",
        evidence=shortened(lines),
        remedy="look up what they do; add them to configs/meanings, with a reason",
    )
