"""What the commands say of a case, held against what a perfect tool says."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from pathlib import Path

from mindspeed_precision.dump.reader import Run, load_run
from mindspeed_precision.errors import PrecisionError
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.records import INIT_STEP, Diagnosis, Finding, RecordKey, Severity, Verdict
from mindspeed_precision.verify.check import check_run
from mindspeed_precision.verify.verify import verify_runs
from silentbench.case import Answer, Case, Training

SAID = (Severity.ERROR, Severity.WARNING)
"""What counts as saying something: what is only for information is no alarm."""


@dataclass(frozen=True, kw_only=True)
class Said:
    """What one command said of one run, or of two.

    Attributes:
        findings: errors and warnings, as it ordered them.
        first: where it says that the fault is.
        ranks: on which ranks that is.
        alarmed: whether it said that something is wrong.
        error: why it could say nothing.
    """

    findings: tuple[Finding, ...] = ()
    first: RecordKey | None = None
    ranks: tuple[int, ...] = ()
    alarmed: bool = False
    error: str = ""


def _of_diagnosis(answer: Diagnosis) -> Said:
    findings = tuple(finding for finding in answer.findings if finding.severity in SAID)
    first = answer.first_divergence
    healthy = answer.status in (Verdict.IDENTICAL, Verdict.WITHIN_TOLERANCE)
    return Said(
        findings=findings,
        first=first.key if first else next((f.where for f in findings if f.where), None),
        ranks=first.ranks if first else (),
        alarmed=bool(findings) or not healthy,
    )


@lru_cache(maxsize=6)
def _read(run: Path) -> Run:
    """Read a run once for all commands."""
    return load_run(run)


def compare(reference: Path, run: Path) -> Said:
    """Ask ``compare``."""
    return _of_diagnosis(compare_runs(_read(reference), _read(run)))


def check(_: Path, run: Path) -> Said:
    """Ask ``check``, which sees one run alone."""
    findings = tuple(f for f in check_run(_read(run)).findings if f.severity in SAID)
    where = next((finding.where for finding in findings), None)
    return Said(findings=findings, first=where, alarmed=bool(findings))


def verify(reference: Path, run: Path) -> Said:
    """Ask ``verify``."""
    findings = tuple(f for f in verify_runs(_read(reference), _read(run)).findings if f.severity in SAID)
    where = next((finding.where for finding in findings), None)
    return Said(findings=findings, first=where, alarmed=bool(findings))


COMMANDS: Mapping[str, Callable[[Path, Path], Said]] = {
    "verify": verify,
    "check": check,
    "compare": compare,
}


@cache
def ask(command: str, reference: Path, run: Path) -> Said:
    """Ask one command; what it raises for bad input is an answer, too."""
    try:
        return COMMANDS[command](reference, run)
    except PrecisionError as error:
        return Said(error=f"{type(error).__name__}: {error}")


@dataclass(frozen=True, kw_only=True)
class Mark:
    """How good one command's answer is.

    Attributes:
        expected: whether a perfect tool says something by this command.
        detected: it said that something is wrong at the first faulty step.
        place: what it names first is the exact place.
        cause: its first finding is the right cause.
        said: its first finding and place, in words.
        false_alarms: what it said of the healthy runs.
    """

    expected: bool
    detected: bool = False
    place: bool = False
    cause: bool = False
    said: str = ""
    false_alarms: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Score:
    """How a case went.

    Attributes:
        case: its id.
        marks: by command.
        failure: why it could not be run.
        trained: seconds that the trainings with the bug and of the twin took, recorded at level ``tensor``.
        asked: seconds that the commands took; what other cases asked before is not asked again.
    """

    case: str
    marks: Mapping[str, Mark] = field(default_factory=dict)
    failure: str = ""
    trained: float = 0.0
    asked: float = 0.0

    def any_of(self, what: str) -> bool:
        """Tell whether a command that should say something is right about ``what``."""
        return any(mark.expected and getattr(mark, what) for mark in self.marks.values())

    @property
    def false_alarms(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(f"{name}: {text}" for name, mark in self.marks.items() for text in mark.false_alarms)


def score(case: Case, runs: Path) -> Score:
    """Ask every command of the faulty run and of the healthy ones."""
    begun = time.perf_counter()
    marks = {name: _mark(case, name, runs) for name in COMMANDS}
    asked = time.perf_counter() - begun
    trained = sum(_seconds(runs / f"{training.name}.json") for training in (case.faulty, case.twin))
    return Score(case=case.id, marks=marks, trained=round(trained, 1), asked=round(asked, 1))


def _seconds(log: Path) -> float:
    """Return how long a training took, as it wrote it down."""
    return float(json.loads(log.read_text(encoding="utf-8"))["seconds"])


def _mark(case: Case, command: str, runs: Path) -> Mark:
    trainings = (case.reference, case.faulty, case.twin_reference, case.twin)
    return mark(case.answers, command, *(runs / training.name for training in trainings))


def mark(
    perfect: tuple[Answer, ...], command: str, reference: Path, faulty: Path, other: Path, twin: Path
) -> Mark:
    """Hold what one command says of a bug, and of the healthy twin, against a perfect answer.

    Args:
        perfect: what a perfect tool says by any command; none for a trap.
        command: the one that is asked.
        reference: a healthy run.
        faulty: the run with the bug.
        other: what the twin is compared with.
        twin: the healthy twin.
    """
    answers = tuple(answer for answer in perfect if command in answer.by)
    of_twin = ask(command, other, twin)
    alarms = _alarms(command, of_twin)
    if not perfect:
        return Mark(
            expected=False, false_alarms=(*alarms, *_alarms(command, ask(command, reference, faulty)))
        )
    said = ask(command, reference, faulty)
    usual = {(finding.id, finding.title) for finding in of_twin.findings}
    findings = tuple(f for f in said.findings if (f.id, f.title) not in usual)
    news = said.alarmed and (bool(findings) or not of_twin.alarmed)
    steps = {answer.step for answer in answers}
    if command == "compare":
        detected = said.first is not None and said.first.step in steps
    else:
        detected = any((f.where.step if f.where else INIT_STEP) in steps for f in findings)
    first = findings[0] if findings else None
    named = first.where if first is not None else None
    places = [said.first, named] if command == "compare" else [named]
    return Mark(
        expected=bool(answers),
        detected=news and detected,
        place=news and any(_at(answer, key, said.ranks, first) for answer in answers for key in places),
        cause=any(first is not None and _causes(answer, first) for answer in answers),
        said=said.error or _words(first, places[0]),
        false_alarms=alarms,
    )


def alarms_of(reference: Training, candidate: Training, runs: Path) -> tuple[str, ...]:
    """Return what ``check`` and ``compare`` say of a healthy pair."""
    one, two = runs / reference.name, runs / candidate.name
    said = [(name, text) for name in ("check", "compare") for text in _alarms(name, ask(name, one, two))]
    return tuple(f"{name}: {text}" for name, text in said)


def _alarms(command: str, said: Said) -> tuple[str, ...]:
    """Say what is wrong with an answer about healthy runs; ``verify`` may warn of what does differ."""
    if said.error:
        return (f"no answer: {said.error}",) if command != "verify" else ()
    grave = [f for f in said.findings if command != "verify" or f.severity is Severity.ERROR]
    if grave:
        return tuple(_words(finding, finding.where) for finding in grave)
    return ("diverged",) if said.alarmed and command != "verify" else ()


def _at(answer: Answer, key: RecordKey | None, ranks: tuple[int, ...], finding: Finding | None) -> bool:
    if key is None:  # of what is no record, the words must say where
        text = "" if finding is None else " ".join((finding.title, *finding.evidence))
        return bool(answer.says) and all(word in text for word in answer.says)
    return (
        key.step == answer.step
        and key.phase.value in answer.phases
        and matches(key.fqn, answer.fqn)
        and (not answer.roles or key.role.value in answer.roles)
        and (not answer.ranks or not ranks or set(ranks) == set(answer.ranks))
    )


def _causes(answer: Answer, finding: Finding) -> bool:
    text = " ".join((finding.title, *finding.evidence))
    return matches(finding.id, answer.ids) and all(word in text for word in answer.says)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Tell whether a name fits one of the shell patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _words(finding: Finding | None, place: RecordKey | None) -> str:
    parts = [finding.id] if finding else []
    if place is not None:
        parts.append(f"at {place.describe()}")
    return " ".join(parts)
