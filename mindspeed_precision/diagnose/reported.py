"""Findings that the runs themselves reported while they ran."""

from __future__ import annotations

from mindspeed_precision.diagnose.facts import Facts
from mindspeed_precision.dump.reported import Entry, reported_entries, reported_finding
from mindspeed_precision.records import Finding, Side


def reported_findings(facts: Facts) -> list[Finding]:
    """Return the findings of the manifests and of the ranks; one that both runs have is given once."""
    merged: dict[tuple[str, str], tuple[Entry, list[Side]]] = {}
    for side, run in facts.whole.items():
        for entry in reported_entries(run):
            key = str(entry.get("id", "")), str(entry.get("title", ""))
            sides = merged.setdefault(key, (entry, []))[1]
            if side not in sides:
                sides.append(side)
    return [reported_finding(entry, _by(sides)) for entry, sides in merged.values()]


def _by(sides: list[Side]) -> str:
    return "both runs" if len(sides) == len(Side) else f"the {sides[0].value}"
