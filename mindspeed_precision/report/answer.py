"""The answer in a few parts: what console, ``report.html`` and ``report.md`` put first."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_precision.records import Diagnosis, Finding, Origin, Severity, Verdict
from mindspeed_precision.report import phrases

ALIGNED = (Verdict.IDENTICAL, Verdict.WITHIN_TOLERANCE)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is said first.

    Attributes:
        status: the verdict on the two runs.
        sentence: the answer in one sentence.
        scalars: what loss and grad norm show of it, in one sentence; empty where they were not recorded.
        first: the first divergence; None: nothing diverges.
        cause: the finding that accounts for it; None: nothing diverges.
        others: what else is an origin, and how much only follows.
        rest: the other findings, most likely first.
    """

    status: Verdict
    sentence: str
    scalars: str
    first: Origin | None
    cause: Finding | None
    others: str
    rest: tuple[Finding, ...]

    @property
    def calm(self) -> bool:
        """Whether the runs agree and nothing that was found is bad: there is little to say."""
        bad = any(finding.severity is not Severity.INFO for finding in self.rest)
        return self.status in ALIGNED and not bad

    @property
    def headline(self) -> str:
        """Both sentences."""
        return " ".join(filter(None, (self.sentence, self.scalars)))


def answer_of(diagnosis: Diagnosis) -> Answer:
    """Return what is said first of a diagnosis."""
    cause = _cause(diagnosis)
    return Answer(
        status=diagnosis.status,
        sentence=phrases.verdict_sentence(diagnosis),
        scalars=phrases.scalars_sentence(diagnosis),
        first=diagnosis.first_divergence,
        cause=cause,
        others=phrases.others(diagnosis, cause),
        rest=tuple(finding for finding in diagnosis.findings if finding is not cause),
    )


def _cause(diagnosis: Diagnosis) -> Finding | None:
    """Return the best finding that accounts for the first divergence."""
    first = diagnosis.first_divergence
    if first is None:
        return None
    return next((finding for finding in diagnosis.findings if first.key in finding.explains), None)


def certainty(finding: Finding) -> str:
    """Say how sure a cause is."""
    if finding.proved_by_replay:
        return "proved by replay"
    if finding.confidence >= 0.9:
        return "near certain"
    if finding.confidence >= 0.7:
        return "likely"
    return "possible" if finding.confidence > 0 else "unknown"
