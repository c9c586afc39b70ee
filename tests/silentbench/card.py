"""The score card, as lines, as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from silentbench.cases import every
from silentbench.score import COMMANDS, Mark, Score

LIST = Path(__file__).with_name("bugs.yaml")
COMMAND = "make silentbench"


@cache
def titles() -> dict[str, str]:
    """Return the title of every bug of the list."""
    return {id_: bug["title"] for id_, bug in yaml.safe_load(LIST.read_text(encoding="utf-8")).items()}


def plain(score: Score, *, trap: bool = False) -> str:
    """Return one case as text; of a ``trap`` nothing may be said."""
    if score.failure:
        return f"{score.case}  could not be run: {score.failure}"
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


def markdown(
    scores: Sequence[Score],
    *,
    mindspore: Sequence[Score] = (),
    why_not: str = "",
    msprobe: Mapping[str, Any] | None = None,
) -> str:
    """Return the card as a page.

    Args:
        scores: of the cases in megatron-core.
        mindspore: of those on MindSpore.
        why_not: why there are none of these.
        msprobe: what ``msprobe_run`` wrote; None: nothing.
    """
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
        *_of_msprobe(msprobe or {}),
        "",
        *_head(msprobe),
    ]
    lines += [_line(score, msprobe, trap=not every()[score.case].answers) for score in scores]
    lines += ["", "## On MindSpore", "", f"The same bugs in the native twin of the model. {why_not}".rstrip()]
    lines += ["", *_head(None), *(_line(score, None, trap=False) for score in mindspore)] if mindspore else []
    return "\n".join([*lines, *_missed(scores, mindspore)]) + "\n"


def _head(msprobe: Mapping[str, Any] | None) -> tuple[str, str]:
    names = ["id", "bug", "detected", "exact place", "cause first", *COMMANDS, "false alarms", "seconds"]
    names += [f"msprobe {mode}" for mode in (msprobe or {}).get("totals", ())]
    return f"| {' | '.join(names)} |", "|---" * len(names) + "|"


def _line(score: Score, msprobe: Mapping[str, Any] | None, *, trap: bool) -> str:
    """Return the row of one case."""
    marks = [_letters(score.marks[name]) if name in score.marks else "" for name in COMMANDS]
    heads = (
        ["trap"] * 3
        if trap
        else ["yes" if score.any_of(what) else "**no**" for what in ("detected", "place", "cause")]
    )
    alarms = str(len(score.false_alarms) or "")
    seconds = f"{score.trained:.1f} + {score.asked:.1f}"
    cells = [score.case, titles()[score.case], *heads, *marks, alarms, seconds]
    cells += _cells_of_msprobe(score.case, msprobe) if msprobe else []
    return f"| {' | '.join(cells)} |"


def _of_msprobe(told: Mapping[str, Any]) -> Iterator[str]:
    """Say what msprobe's compare found, by its own rules, of the cases that it was given."""
    for mode, counted in told.get("totals", {}).items():
        numbers = ", ".join(f"{name} {number}" for name, number in counted.items())
        yield f"- msprobe {told['msprobe']} compare, {mode} (`{COMMAND}-msprobe`): {numbers}"


def _cells_of_msprobe(case: str, told: Mapping[str, Any]) -> Iterator[str]:
    """Yield the letters of one case: detected, place, and ``!`` where rows of the healthy twin are marked."""
    of_case = told["cases"].get(case, {})
    for mode in told["totals"]:
        found = of_case.get(mode)
        if found is None or "failed" in found:
            yield "." if found is None else "failed"
        else:
            letters = f"{'D' if found['detected'] else '-'}{'P' if found['place'] else '-'}"
            yield letters + ("!" if found["false_alarms"] else "")


def _spread(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    return f"median {ordered[len(ordered) // 2]:.1f}, largest {ordered[-1]:.1f} of a case"


def _missed(scores: Sequence[Score], mindspore: Sequence[Score]) -> list[str]:
    """Say of each case that is not wholly right what the commands said, and of healthy runs what they did."""
    lines = []
    named = [(score.case, score, bool(every()[score.case].answers)) for score in scores]
    named += [(f"{score.case} on MindSpore", score, True) for score in mindspore]
    for name, score, is_bug in named:
        lines += [f"- {name}: false alarm of {alarm}" for alarm in score.false_alarms]
        if score.failure:
            lines.append(f"- {name} could not be run")
        elif is_bug:
            wrong = [word for word in ("detected", "place", "cause") if not score.any_of(word)]
            said = "; ".join(f"{command}: {mark.said or 'nothing'}" for command, mark in score.marks.items())
            lines += [f"- {name} not right: {', '.join(wrong)}. Said: {said}"] if wrong else []
    return ["", "## What is not right", "", *lines] if lines else []


def write_json(scores: Sequence[Score], path: Path) -> None:
    """Write everything."""
    text = json.dumps({"totals": totals(scores), "cases": [asdict(score) for score in scores]}, indent=1)
    path.write_text(text, encoding="utf-8")
