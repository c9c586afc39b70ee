"""The certificate: what was repeated, by whom, and through which step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_precision.align.compatible import numbers_text
from mindspeed_precision.certify.naming import name_differences, not_loaded
from mindspeed_precision.certify.repetition import Repetition, repetition, share
from mindspeed_precision.counting import count
from mindspeed_precision.dump.format import INDEX
from mindspeed_precision.dump.reader import Run, load_run
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.permissions import make_directory, write_text
from mindspeed_precision.records import CheckOutcome, Examination, Finding
from mindspeed_precision.redaction import redact_words

SCHEMA = 1
FILE = "certificate.json"
_LISTED = 20
_KEPT = (
    "framework",
    "versions",
    "package_version",
    "environment",
    "numerics",
    "settings",
    "parallel",
    "created",
)


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What is certified, or why nothing is.

    Attributes:
        repetitions: what was compared with what.
        resumed_at: the step at which a run went on from a checkpoint; None where none did.
        findings: what was not repeated, the first one first.
        reasons: why nothing is certified although nothing differs.
        launch: the command that was repeated, without secrets; empty where existing runs were compared.
    """

    repetitions: tuple[Repetition, ...]
    resumed_at: int | None
    findings: tuple[Finding, ...]
    reasons: tuple[str, ...]
    launch: tuple[str, ...] = ()

    @property
    def through(self) -> int | None:
        """Last step through which every repetition is bit-equal; None where not even the first is."""
        through: int | None = None
        for one in self.repetitions:  # in the order of steps: the later one counts where the earlier is whole
            if one.through is None:
                break
            through = one.through
            if one.through != one.steps[-1]:
                break
        return through

    @property
    def certified(self) -> bool:
        """Whether every record of every step is bit-equal, and that says something."""
        return not self.reasons and not self.findings and all(one.whole for one in self.repetitions)

    @property
    def statement(self) -> str:
        """The answer in one sentence."""
        counts = share(self.repetitions)
        over = f"over {_percent(counts['percent'])} of {counts['records']} records"
        resume = "" if self.resumed_at is None else f", resumed at step {self.resumed_at}"
        if self.certified:
            return f"CERTIFIED: bit-equal through step {self.through} {over}{resume}."
        if self.reasons and not self.findings:
            return f"NOT CERTIFIED: {'; '.join(self.reasons)}."
        until = "not bit-equal" if self.through is None else f"bit-equal through step {self.through} alone"
        return f"NOT REPEATED: {until}; {counts['equal']} of {counts['records']} records are equal{resume}."


def _percent(value: float) -> str:
    """Write a share that is not whole so that it does not look whole."""
    return "100 %" if value == 100 else f"{min(value, 99.99):.2f} %"


def certify_runs(*runs: str | Path | Run, launch: Sequence[str] = ()) -> Certificate:
    """Certify two runs that should be one, or a run against its two parts with a checkpoint between them.

    Args:
        runs: two runs; or the unbroken run, its first part, and the part that was resumed.
        launch: the command that they came from.

    Raises:
        ConfigError: another number of runs.
        DumpError: a run cannot be read.
        IncomparableError: the runs do not answer the same question.
    """
    if len(runs) not in (2, 3):
        raise ConfigError(
            "a certificate is about two runs, or about three",
            where="certify",
            found=f"{len(runs)}",
            expected="RUN RUN2, or FULL FIRST RESUMED",
        )
    places = [Path(run.path if isinstance(run, Run) else run).resolve() for run in runs]
    if len(set(places)) < len(places):
        raise ConfigError(
            "one run given twice, which repeats itself whatever the training does",
            where="certify",
            found=str(places[0]),
            expected="runs of trainings of their own",
        )
    whole, *others = [run if isinstance(run, Run) else load_run(run) for run in runs]
    names = ["second"] if len(others) == 1 else ["first part of the", "resumed"]
    repetitions = tuple(repetition(name, whole, other) for name, other in zip(names, others, strict=True))
    resumed = repetitions[1] if len(repetitions) == 2 else None
    findings = [f for one in repetitions for f in name_differences(one, resumed=one is resumed)]
    if resumed is not None:
        expected = repetitions[0].other_end
        if resumed.began != expected:
            findings.insert(0, not_loaded(resumed, expected=expected))
    return Certificate(
        repetitions=repetitions,
        resumed_at=None if resumed is None else resumed.began,
        findings=tuple(findings),
        reasons=tuple(dict.fromkeys(reason for one in repetitions for reason in _reasons(one))),
        launch=tuple(redact_words(launch)),
    )


def _reasons(one: Repetition) -> Iterator[str]:
    """Yield why equal bits would prove nothing, and what could not be compared."""
    yield from (finding.title for finding in one.vacuous)
    if one.alone:
        yield f"{count(one.alone, 'record', 'are')} of one run alone"
    if any(not records.complete for run in (one.one, one.other) for records in run.ranks.values()):
        yield "a run did not end as planned"


def examination_of(certificate: Certificate, *, file: str = "") -> Examination:
    """Return the certificate as every other command answers."""
    return Examination(
        command="certify",
        subjects={"run": str(certificate.repetitions[0].one.path)}
        | {one.name: str(one.other.path) for one in certificate.repetitions},
        findings=certificate.findings,
        outcomes=tuple(_outcome(one, certificate) for one in certificate.repetitions),
        notes=(*_notes(certificate), *((f"certificate: {file}",) if file else ())),
        headline=certificate.statement,
        tables={"not compared": tuple(not_compared(certificate))} if any(not_compared(certificate)) else {},
    )


def _outcome(one: Repetition, certificate: Certificate) -> CheckOutcome:
    stands = not certificate.reasons or bool(certificate.findings)
    return CheckOutcome(
        name=f"bit_equal.{one.name.split()[0]}",
        holds=f"steps {numbers_text(one.steps)} have the same bits in {one.one.path} and {one.other.path}",
        exercised=one.total if stands else 0,
        unit="records",
        failed=one.total - one.equal,
        skipped="" if stands else "; ".join(certificate.reasons),
    )


def _notes(certificate: Certificate) -> Iterator[str]:
    seen = dict.fromkeys(note for one in certificate.repetitions for note in one.diagnosis.notes)
    yield from seen
    if certificate.findings:
        yield from certificate.reasons


def not_compared(certificate: Certificate) -> Iterator[str]:
    """Yield which records were not comparable: of one run alone, or of another shape or type."""
    for one in certificate.repetitions:
        lines = [
            f"{u.key.describe()}: the {u.side.value} alone, rank {u.rank}" for u in one.diagnosis.unmatched
        ]
        lines += [
            f"{c.key.describe()}: {c.reason}" for c in one.different if c.verdict.value == "incomparable"
        ]
        yield from lines[:_LISTED]
        if len(lines) > _LISTED:
            yield f"and {len(lines) - _LISTED} more of the {one.name} run"


def write_certificate(certificate: Certificate, directory: str | Path) -> Path:
    """Write ``certificate.json``; return its path.

    Raises:
        ConfigError: it cannot be written.
    """
    path = Path(directory) / FILE
    try:
        make_directory(path.parent, exist_ok=True)
        write_text(path, json.dumps(as_plain(certificate), indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise ConfigError("cannot be written", where=str(path), found=str(error.strerror)) from error
    return path


def as_plain(certificate: Certificate) -> dict[str, Any]:
    """Return the certificate as plain data (``docs/certify.md``)."""
    first = certificate.findings[0] if certificate.findings else None
    runs = {"run": certificate.repetitions[0].one} | {one.name: one.other for one in certificate.repetitions}
    return {
        "schema": SCHEMA,
        "certified": certificate.certified,
        "statement": certificate.statement,
        "bit_equal_through_step": certificate.through,
        "resumed_at_step": certificate.resumed_at,
        "records": dict(share(certificate.repetitions)),
        "repetitions": [_repetition(one) for one in certificate.repetitions],
        "first_difference": None if first is None else _difference(first),
        "reasons": list(certificate.reasons),
        "not_compared": list(not_compared(certificate)),
        "launch": list(certificate.launch),
        "runs": {name: _run(run) for name, run in runs.items()},
    }


def _repetition(one: Repetition) -> dict[str, Any]:
    return {"of": one.name, "steps": list(one.steps), "through_step": one.through, **share([one])}


def _difference(finding: Finding) -> dict[str, Any]:
    return {
        "id": finding.id,
        "title": finding.title,
        "evidence": list(finding.evidence),
        "where": None if finding.where is None else finding.where.describe(),
    }


def _run(run: Run) -> dict[str, Any]:
    known: Mapping[str, Any] = run.manifest
    return {
        "path": str(run.path),
        "digest": digest_of(run),
        **{name: known[name] for name in _KEPT if name in known},
    }


def digest_of(run: Run) -> str:
    """Return a digest of every rank's index, by rank: BLAKE2b of 16 bytes, in hexadecimal."""
    digest = hashlib.blake2b(digest_size=16)
    for rank in sorted(run.ranks):
        digest.update(f"{rank}\n".encode())
        for directory in run.ranks[rank].joined or (run.ranks[rank].directory,):
            digest.update((directory / INDEX).read_bytes())
    return digest.hexdigest()
