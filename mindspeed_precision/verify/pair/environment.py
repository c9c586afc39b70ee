"""Environment variables, switches of the framework, versions: by what they mean for numerics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_precision.align.compatible import comparable
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.meanings import Effect, Meaning, load_meanings
from mindspeed_precision.records import Severity
from mindspeed_precision.verify.pair.evidence import by_severity
from mindspeed_precision.verify.pair.registry import pair_check
from mindspeed_precision.verify.pair_facts import PairFacts
from mindspeed_precision.verify.registry import Answer

_UNKNOWN = Meaning(effect=Effect.MAY, reason="not in the table of meanings")
_SWITCH = Meaning(effect=Effect.MAY, reason="a switch of the framework: other kernels")
_OF_THE_RECORDING = {"digest_kernel"}
"""Switches that say how a run was recorded, not how it was computed."""


@pair_check(
    "env.differs",
    holds="environment variables and switches that decide numbers are the same",
    unit="variables and switches",
)
def environment(facts: PairFacts) -> Answer:
    """Compare the environment by what each variable means."""
    tables = load_meanings()
    lines: list[tuple[Severity, str]] = []
    one, two, skipped = _sections(facts, "environment")
    for name in sorted({*one, *two}):
        if one.get(name) != two.get(name):
            meaning = tables.variable(name) or _UNKNOWN
            lines.append((meaning.effect.severity, _line(name, one, two, meaning.reason)))
    left, right, _ = _sections(facts, "numerics")
    lines += [
        (_SWITCH.effect.severity, _line(name, left, right, _SWITCH.reason))
        for name in sorted({*left, *right} - _OF_THE_RECORDING)
        if left.get(name) != right.get(name)
    ]
    return Answer(
        exercised=len({*one, *two}) + len({*left, *right}),
        findings=tuple(by_severity("env.differs", "settings of the environment", lines, _REMEDY)),
        skipped=skipped,
        failed=len(lines),
    )


_REMEDY = "launch both runs with the same environment (launch/*.sh)"


@pair_check(
    "env.versions_differ",
    holds="framework, Megatron, MindSpeed, CANN and driver are of the same versions",
    unit="versions",
)
def versions(facts: PairFacts) -> Answer:
    """Compare versions, those of the frameworks themselves only within one framework."""
    one, two = (_versions(run) for run in (facts.baseline, facts.candidate))
    names = sorted({*one, *two})
    if facts.foreign:
        names = [name for name in names if name in one and name in two]
    lines = []
    for name in names:
        if one.get(name) != two.get(name):
            meaning = load_meanings().version(name) or _UNKNOWN
            lines.append((meaning.effect.severity, _line(name, one, two, meaning.reason)))
    skipped = "" if names else "no version is in both runs"
    remedy = "use the same versions where bits must agree"
    findings = tuple(by_severity("env.versions_differ", "versions", lines, remedy))
    return Answer(exercised=len(names), findings=findings, skipped=skipped, failed=len(lines))


def _versions(run: Run) -> dict[str, Any]:
    found = run.manifest.get("versions")
    versions = dict(found) if isinstance(found, dict) else {}
    framework = run.manifest.get("framework")
    if isinstance(framework, dict) and framework.get("name") and framework.get("version"):
        versions.setdefault(str(framework["name"]), framework["version"])
    return versions


def _sections(facts: PairFacts, name: str) -> tuple[Mapping[str, Any], Mapping[str, Any], str]:
    """Return a section of both runs; empty, with a reason, where one of them has none."""
    one, two = (run.manifest.get(name) for run in (facts.baseline, facts.candidate))
    if not isinstance(one, dict) or not isinstance(two, dict):
        return {}, {}, f"a run does not say its {name}"
    left_out = f"what one framework alone has in its {name}, or reads in its own way" if facts.foreign else ""
    return *comparable(facts.baseline, facts.candidate, name), left_out


def _line(name: str, one: Mapping[str, Any], two: Mapping[str, Any], reason: str) -> str:
    left, right = (section.get(name, "not set") for section in (one, two))
    return f"{name}: {left} in the baseline, {right} in the candidate: {reason}"


__all__ = ["environment", "versions"]
