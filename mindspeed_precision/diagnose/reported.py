"""Findings that the runs themselves reported while they ran."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mindspeed_precision.diagnose.facts import Facts
from mindspeed_precision.records import Finding, Severity, Side


def reported_findings(facts: Facts) -> list[Finding]:
    """Return the findings of the manifests and of the ranks; one that both runs have is given once."""
    merged: dict[tuple[str, str], tuple[Mapping[str, Any], list[Side]]] = {}
    for side, run in ((Side.BASELINE, facts.baseline), (Side.CANDIDATE, facts.candidate)):
        found = [run.manifest.get("findings"), *(list(rank.findings) for rank in run.ranks.values())]
        for entry in (entry for entries in found for entry in _entries(entries)):
            key = str(entry.get("id", "")), str(entry.get("title", ""))
            sides = merged.setdefault(key, (entry, []))[1]
            if side not in sides:
                sides.append(side)
    return [_finding(entry, sides) for entry, sides in merged.values()]


def _entries(found: object) -> Iterable[Mapping[str, Any]]:
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def _finding(entry: Mapping[str, Any], sides: list[Side]) -> Finding:
    evidence = entry.get("evidence", ())
    lines = [evidence] if isinstance(evidence, str) else [str(line) for line in evidence]
    where = "both runs" if len(sides) == len(Side) else f"the {sides[0].value}"
    return Finding(
        id=str(entry.get("id", "coverage.unnamed")),
        severity=_severity(entry.get("severity")),
        confidence=_confidence(entry.get("confidence")),
        title=str(entry.get("title", "")),
        evidence=(f"reported by {where} while running", *lines),
        remedy=str(entry.get("remedy", "")),
    )


def _severity(value: object) -> Severity:
    try:
        return Severity(value)
    except ValueError:
        return Severity.WARNING


def _confidence(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 1.0
