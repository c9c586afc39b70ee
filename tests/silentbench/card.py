"""The score card, as lines, as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

import yaml

from silentbench.cases import every
from silentbench.score import COMMANDS, Mark, Score

LIST = Path(__file__).with_name("bugs.yaml")
COMMAND = "make silentbench"


@cache
def titles() -> dict[str, str]:
    """Return the title of every bug of the list."""
    return {id_: bug["title"] for id_, bug in yaml.safe_load(LIST.read_text(encoding="utf-8")).items()}


def plain(score: Score) -> str:
    """Return one case as text."""
    if score.failure:
        return f"{score.case}  could not be run: {score.failure}"
    trap = not every()[score.case].answers
    head = "trap" if trap else " ".join(_word(score, what) for what in ("detected", "place", "cause"))
    lines = [f"{score.case}  {head}  {titles()[score.case]}  ({score.trained:.1f} s + {score.asked:.1f} s)"]
    for name, mark in score.marks.items():
        if mark.said or mark.expected:
            lines.append(f"      {name:8}{_letters(mark):5}{mark.said}")
    lines += [f"      FALSE ALARM {alarm}" for alarm in score.false_alarms]
    return "\n".join(lines)


def _word(score: Score, what: str) -> str:
    return what if score.any_of(what) else f"NOT-{what}"


def _letters(mark: Mark) -> str:
    """``DPC``: detected, place, cause; in brackets where a perfect tool says nothing by this command."""
    flags = ((mark.detected, "D"), (mark.place, "P"), (mark.cause, "C"))
    letters = "".join(letter if right else "-" for right, letter in flags)
    return letters if mark.expected else "."


def totals(scores: Iterable[Score]) -> dict[str, int]:
    """Count over the cases that are bugs; the traps count for false alarms only."""
    all_ = list(scores)
    bugs = [score for score in all_ if every()[score.case].answers]
    counted = {"cases": len(bugs), "not run": sum(bool(score.failure) for score in all_)}
    for what in ("detected", "place", "cause"):
        counted[what] = sum(score.any_of(what) for score in bugs)
    for name in COMMANDS:
        expected = [score.marks[name] for score in bugs if name in score.marks]
        counted[f"detected by {name}"] = sum(mark.expected and mark.detected for mark in expected)
    counted["with false alarms"] = sum(bool(score.false_alarms) for score in all_)
    return counted


def markdown(scores: Sequence[Score]) -> str:
    """Return the card as a page."""
    counted = totals(scores)
    lines = [
        "# SilentBench",
        "",
        "Real precision bugs, each planted in megatron-core on CPU processes, and its healthy twin.",
        f"Written by `{COMMAND}`. The columns, and what is not here: `tests/silentbench/README.md`.",
        "",
        f"- bugs of the list: {len(titles())}; cases: {len(every())}; in this card: {len(scores)}",
        *(f"- {name}: {number}" for name, number in counted.items()),
        f"- seconds in trainings (bug and twin): {_spread([score.trained for score in scores])}; in the "
        f"commands: {_spread([score.asked for score in scores])}",
        "",
        "| id | bug | detected | exact place | cause first | verify | check | compare | "
        "false alarms | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for score in scores:
        marks = [_letters(score.marks[name]) if name in score.marks else "" for name in COMMANDS]
        trap = not every()[score.case].answers
        heads = (
            ["trap"] * 3
            if trap
            else ["yes" if score.any_of(what) else "**no**" for what in ("detected", "place", "cause")]
        )
        alarms = str(len(score.false_alarms) or "")
        seconds = f"{score.trained:.1f} + {score.asked:.1f}"
        cells = (score.case, titles()[score.case], *heads, *marks, alarms, seconds)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *_missed(scores)]) + "\n"


def _spread(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    return f"median {ordered[len(ordered) // 2]:.1f}, largest {ordered[-1]:.1f} of a case"


def _missed(scores: Sequence[Score]) -> list[str]:
    """Say of each case that is not wholly right what the commands said, and of healthy runs what they did."""
    lines = []
    for score in scores:
        lines += [f"- {score.case}: false alarm of {alarm}" for alarm in score.false_alarms]
        if score.failure:
            lines.append(f"- {score.case} could not be run")
        elif every()[score.case].answers:
            wrong = [word for word in ("detected", "place", "cause") if not score.any_of(word)]
            said = "; ".join(f"{name}: {mark.said or 'nothing'}" for name, mark in score.marks.items())
            lines += [f"- {score.case} not right: {', '.join(wrong)}. Said: {said}"] if wrong else []
    return ["", "## What is not right", "", *lines] if lines else []


def write_json(scores: Sequence[Score], path: Path) -> None:
    """Write everything."""
    text = json.dumps({"totals": totals(scores), "cases": [asdict(score) for score in scores]}, indent=1)
    path.write_text(text, encoding="utf-8")
