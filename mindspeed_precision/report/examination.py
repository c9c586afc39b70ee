"""An examination on a terminal and as JSON: what is wrong, then what was looked at."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict
from typing import Any, TextIO

from mindspeed_precision.counting import count, singular
from mindspeed_precision.records import CheckOutcome, Examination, Severity
from mindspeed_precision.report.console import Block, finding_blocks, print_blocks
from mindspeed_precision.report.verdict_json import finding_json, jsonable

SCHEMA = 1


def examination_blocks(answer: Examination) -> list[Block]:
    """Return what is shown of an examination."""
    bad = any(finding.severity is Severity.ERROR for finding in answer.findings)
    style = "bold red" if bad else "bold yellow" if answer.findings or answer.vacuous else "bold green"
    shown = [Block(label="", lines=(headline(answer),), style=style)]
    shown += [block for finding in answer.findings for block in finding_blocks(finding)]
    shown += [Block(label=title, lines=lines, table=True) for title, lines in answer.tables.items()]
    looked = sorted((one for one in answer.outcomes if one.exercised), key=lambda one: not one.failed)
    ids = {finding.id for finding in answer.findings}
    shown.append(Block(label="checked", lines=tuple(_outcome(one, ids) for one in looked)))
    gaps = [one for one in answer.outcomes if one.skipped and one.applies]
    shown.append(Block(label="skipped", lines=tuple(f"{one.name}: {one.skipped}" for one in gaps)))
    shown.append(Block(label="notes", lines=answer.notes))
    return [block for block in shown if any(block.lines)]


def headline(answer: Examination) -> str:
    """Return the answer in one sentence."""
    if answer.headline:
        return answer.headline
    counts = {s: sum(finding.severity is s for finding in answer.findings) for s in Severity}
    warnings = count(counts[Severity.WARNING], "warning")
    if counts[Severity.ERROR]:
        return f"FAILED: {count(counts[Severity.ERROR], 'error')}, {warnings}."
    if answer.vacuous:
        return "NO ANSWER: nothing was looked at."
    exercised = count(sum(one.exercised > 0 for one in answer.outcomes), "check")
    if counts[Severity.WARNING]:
        return f"{warnings}, no error; {exercised} exercised."
    return f"PASSED: {exercised} exercised, nothing found."


def _outcome(outcome: CheckOutcome, ids: Collection[str]) -> str:
    """Say what held, and of how many things; of what did not, with the finding of the check's name."""
    law = outcome.holds.rstrip(".")
    seen = f"{outcome.exercised} {singular(outcome.unit) if outcome.exercised == 1 else outcome.unit}"
    if not outcome.failed:
        return f"{seen}: {law}"
    name = f"  [{outcome.name}]" if outcome.name in ids else ""  # a check has findings of other names, too
    return f"NOT HELD by {outcome.failed} of {seen}: {law}{name}"


def show_examination(answer: Examination, *, stream: TextIO | None = None) -> None:
    """Print an examination: coloured on a terminal where rich is installed, else plain."""
    print_blocks(examination_blocks(answer), stream)


def examination_text(answer: Examination, **more: Any) -> str:
    """Return the examination as JSON, for machines: the same facts, and what a command has beside them."""
    plain = {
        "schema": SCHEMA,
        "command": answer.command,
        "headline": headline(answer),
        "subjects": dict(answer.subjects),
        "findings": [finding_json(finding) for finding in answer.findings],
        "outcomes": [asdict(outcome) for outcome in answer.outcomes],
        "tables": {title: list(lines) for title, lines in answer.tables.items()},
        "notes": list(answer.notes),
        **more,
    }
    return json.dumps(jsonable(plain), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def examination_status(answer: Examination) -> tuple[int, str]:
    """Return 0 (nothing found), 1 (a finding of severity error) or 2 (nothing was looked at) and why."""
    if any(finding.severity is Severity.ERROR for finding in answer.findings):
        return 1, ""
    if answer.vacuous:
        reasons = "; ".join(f"{one.name}: {one.skipped}" for one in answer.outcomes if one.skipped)
        return 2, f"{answer.command} looked at nothing: {reasons or 'there is nothing to look at'}"
    return 0, ""


__all__ = [
    "examination_blocks",
    "examination_status",
    "examination_text",
    "headline",
    "show_examination",
]
