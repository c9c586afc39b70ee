"""Findings that a run reported while it ran: those of its manifest, and of each rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mindspeed_precision.dump.reader import Run
from mindspeed_precision.records import Finding, Severity

Entry = Mapping[str, Any]


def reported_entries(run: Run) -> list[Entry]:
    """Return the findings as they were written: of rank 0 first, then those of the other ranks."""
    found = [run.manifest.get("findings"), *(list(rank.findings) for rank in run.ranks.values())]
    return [entry for entries in found for entry in _entries(entries)]


def _entries(found: object) -> Iterable[Entry]:
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def reported_finding(entry: Entry, by: str) -> Finding:
    """Return an entry as a finding.

    Args:
        entry: as it was written; what is absent, or of another type, gets a default.
        by: who reported it.
    """
    evidence = entry.get("evidence") or []
    lines = [str(line) for line in evidence] if isinstance(evidence, list) else [str(evidence)]
    return Finding(
        id=str(entry.get("id", "coverage.unnamed")),
        severity=_severity(entry.get("severity")),
        confidence=_confidence(entry.get("confidence")),
        title=str(entry.get("title", "")),
        evidence=(f"reported by {by} while running", *lines),
        remedy=str(entry.get("remedy", "")),
    )


def _severity(value: object) -> Severity:
    try:
        return Severity(value)
    except ValueError:
        return Severity.WARNING


def _confidence(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 1.0
