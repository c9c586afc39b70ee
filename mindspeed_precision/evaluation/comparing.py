"""Two files of results, task by task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_precision.counting import count
from mindspeed_precision.evaluation.reading import Key, Results, Score, read_results
from mindspeed_precision.records import CheckOutcome, Examination, Finding, Severity

FINDINGS = (
    "evaluation.differs",
    "evaluation.undecided",
    "evaluation.missing_task",
    "evaluation.nonfinite",
)
"""Every id that this command may give."""

_CHANCE = 2.0
"""Standard errors of the difference beyond which chance is a poor explanation (5 %)."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One metric of one task in both files.

    Attributes:
        key: task and metric.
        one: the baseline's.
        two: the candidate's.
    """

    key: Key
    one: Score
    two: Score

    @property
    def difference(self) -> float:
        """Candidate minus baseline."""
        return self.two.value - self.one.value

    @property
    def error(self) -> float | None:
        """Standard error of the difference of two independent samples; None: one side gives none.

        Both sides answer the same questions, so that the true one is smaller: what is within this may still
        be a difference.
        """
        if self.one.stderr is None or self.two.stderr is None:
            return None
        return math.hypot(self.one.stderr, self.two.stderr)

    @property
    def ratio(self) -> float | None:
        """The difference in standard errors."""
        return None if self.error is None else abs(self.difference) / self.error

    @property
    def same(self) -> bool:
        """Whether both are the same finite number."""
        return math.isfinite(self.one.value) and self.one.value == self.two.value

    @property
    def nowhere_finite(self) -> bool:
        """Whether neither side is a finite number: two results that are none do not agree."""
        return not math.isfinite(self.one.value) and not math.isfinite(self.two.value)

    @property
    def name(self) -> str:
        """Task and metric, for a person."""
        return " ".join(filter(None, self.key))

    def judgement(self) -> str:
        """Say in a few words whether the difference is one."""
        if self.same:
            return "the same"
        if self.nowhere_finite:
            return "not finite on both sides"
        if not math.isfinite(self.difference):
            return "not finite on one side"
        if self.ratio is None:
            return "differs; no standard error is known"
        if self.ratio <= 1:
            return "within the standard error"
        return f"{self.ratio:.1f} standard errors" + ("" if self.ratio > _CHANCE else ", may be chance")


def compare_evaluations(baseline: str | Path, candidate: str | Path) -> Examination:
    """Compare two files of results.

    Args:
        baseline: to agree with.
        candidate: that is examined.

    Returns:
        Differences beyond chance as errors, what cannot be decided and missing tasks as warnings.

    Raises:
        ConfigError: a file cannot be read, or holds no score.
    """
    one, two = read_results(baseline), read_results(candidate)
    compared = [
        Compared(key=key, one=one.scores[key], two=two.scores[key]) for key in one.scores if key in two.scores
    ]
    findings = [*_judged(compared), *_missing(one, two)]
    beyond = sum(finding.id in ("evaluation.differs", "evaluation.nonfinite") for finding in findings)
    return Examination(
        command="evaluation",
        subjects={"baseline": str(one.path), "candidate": str(two.path)},
        findings=tuple(findings),
        outcomes=(_outcome(compared, beyond, one, two),),
        notes=tuple(_notes(one, two, compared)),
        tables={"scores": tuple(_table(compared))} if compared else {},
    )


def _outcome(compared: Sequence[Compared], beyond: int, one: Results, two: Results) -> CheckOutcome:
    nothing = f"no metric is in both: {_some(one.scores)} in the one, {_some(two.scores)} in the other"
    return CheckOutcome(
        name="evaluation.differs",
        holds="no metric differs by more than chance explains",
        exercised=len(compared),
        unit="metrics",
        failed=beyond,
        skipped="" if compared else nothing,
    )


def _judged(compared: Sequence[Compared]) -> list[Finding]:
    findings = []
    for one in compared:
        if one.same or (one.ratio is not None and one.ratio <= _CHANCE):
            continue
        if not math.isfinite(one.difference):
            said = "is finite on no side" if one.nowhere_finite else "is not finite on one side"
            findings.append(_finding("evaluation.nonfinite", Severity.ERROR, one, said))
        elif one.ratio is not None:
            said = f"differs by {one.ratio:.1f} standard errors"
            findings.append(_finding("evaluation.differs", Severity.ERROR, one, said))
        else:
            said = "differs, and no standard error is known: chance cannot be told from a difference"
            findings.append(_finding("evaluation.undecided", Severity.WARNING, one, said))
    return findings


def _finding(id_: str, severity: Severity, one: Compared, said: str) -> Finding:
    evidence = [f"{one.one.value:g} in the baseline, {one.two.value:g} in the candidate"]
    if math.isfinite(one.difference):
        evidence[0] += f": {'higher' if one.difference > 0 else 'lower'} by {abs(one.difference):.3g}"
    if one.error is not None:
        evidence.append(f"the standard error of the difference is {one.error:.3g}")
    return Finding(
        id=id_,
        severity=severity,
        confidence=0.95 if one.ratio is not None else 0.5,
        title=f"{one.name} {said}",
        evidence=tuple(evidence),
        remedy="compare the trainings (`compare`, `verify`), and the same evaluation data and prompts",
    )


def _missing(one: Results, two: Results) -> list[Finding]:
    findings = []
    for mine, other, who in ((one, two, "baseline"), (two, one, "candidate")):
        alone = [" ".join(filter(None, key)) for key in mine.scores if key not in other.scores]
        if alone:
            findings.append(
                Finding(
                    id="evaluation.missing_task",
                    severity=Severity.WARNING,
                    confidence=1.0,
                    title=f"{count(len(alone), 'metric')} of the {who} alone",
                    evidence=tuple(alone),
                    remedy="evaluate both on the same tasks",
                )
            )
    return findings


def _notes(one: Results, two: Results, compared: Sequence[Compared]) -> list[str]:
    notes = [f"{who}: read as {found.kind}" for who, found in (("baseline", one), ("candidate", two))]
    for who, found in (("baseline", one), ("candidate", two)):
        if found.left_out:
            more = f" and {len(found.left_out) - 3} more" if len(found.left_out) > 3 else ""
            notes.append(f"{who}: not read: {'; '.join(found.left_out[:3])}{more}")
    if any(one.one.derived or one.two.derived for one in compared):
        notes.append("standard errors of shares were derived from the number of questions")
    return notes


def _table(compared: Sequence[Compared]) -> list[str]:
    rows = [("metric", "baseline", "candidate", "difference", "")]
    rows += [
        (one.name, _shown(one.one), _shown(one.two), f"{one.difference:+.3g}", one.judgement())
        for one in compared
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return [
        "  ".join(
            cell.ljust(width) if at in (0, 4) else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _shown(score: Score) -> str:
    return f"{score.value:g}" + ("" if score.stderr is None else f" ± {score.stderr:.2g}")


def _some(scores: Mapping[Key, Score]) -> str:
    names = [" ".join(filter(None, key)) for key in scores]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


__all__ = ["FINDINGS", "compare_evaluations"]
