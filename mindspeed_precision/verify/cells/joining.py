"""What a law says of the parts of a run, as what it says of the whole."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mindspeed_precision.records import Finding
from mindspeed_precision.verify.partial import Partial, joined
from mindspeed_precision.verify.registry import Answer, Check
from mindspeed_precision.verify.run_facts import RunFacts

_COUNTED = re.compile(r"(\d+) (.*)", re.DOTALL)
_ABSENT = ("no ", "it needs ", "every parameter", "one rank of each lane")
"""How a reason begins that says that there is nothing of a kind: there may be in another part."""


def joined_answer(check: Check[RunFacts], answers: Sequence[Answer]) -> Answer:
    """Put what a check says of several parts of a run together.

    Args:
        check: which.
        answers: in the order of the parts.
    """
    findings = _findings(check, answers)
    exercised = sum(answer.exercised for answer in answers)
    failed = sum(answer.failed or 0 for answer in answers)
    failed += len(_findings(check, [answer for answer in answers if answer.failed is None]))
    return check.settled(
        Answer(
            exercised=exercised,
            findings=tuple(findings),
            failed=failed,
            skipped=joined_reasons([answer.skipped for answer in answers], looked=exercised > 0),
            applies=any(answer.applies for answer in answers),
        )
    )


def _findings(check: Check[RunFacts], answers: Sequence[Answer]) -> list[Finding]:
    found = [one for answer in answers for one in answer.findings]
    partials = joined(one for one in found if isinstance(one, Partial))
    whole = [one for one in found if not isinstance(one, Partial)]
    return [*sorted(partials, key=lambda one: check.ids.index(one.id)), *whole]


def joined_reasons(reasons: Sequence[str], *, looked: bool) -> str:
    """Put the reasons of several parts together: counts of one reason are added, the others told once.

    Args:
        reasons: of each part, one after the other behind semicolons.
        looked: in some part there was something to look at.
    """
    counts: dict[str, int] = {}
    told = looked or any(_COUNTED.match(text) for text in reasons)
    for reason in (one for text in reasons for one in text.split("; ") if one):
        counted = _COUNTED.fullmatch(reason)
        text, number = (counted.group(2), int(counted.group(1))) if counted else (reason, 0)
        if not (told and reason.startswith(_ABSENT)):
            counts[text] = counts.get(text, 0) + number
    return "; ".join(f"{number} {text}" if number else text for text, number in counts.items())
