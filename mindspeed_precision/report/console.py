"""The verdict on a terminal: what a tired person must see first, first."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from mindspeed_precision.records import Diagnosis, Finding, Severity, Verdict
from mindspeed_precision.report import phrases
from mindspeed_precision.report.answer import answer_of, certainty
from mindspeed_precision.report.html import MISSING_JINJA
from mindspeed_precision.report.loss_table import loss_table, same
from mindspeed_precision.report.refine_file import next_lines
from mindspeed_precision.report.visible import one_line

_LABEL = 10
_MARGIN = 2
_WIDEST = 110
_STYLES = {
    Verdict.IDENTICAL: "bold green",
    Verdict.WITHIN_TOLERANCE: "bold green",
    Verdict.DIVERGED: "bold red",
    Verdict.MISSING: "bold yellow",
    Verdict.INCOMPARABLE: "bold yellow",
}


@dataclass(frozen=True, kw_only=True)
class Block:
    """A labelled paragraph.

    Attributes:
        label: word in the margin; empty for a paragraph of its own.
        lines: text; wrapped unless ``table``.
        style: for terminals that have some.
        table: lines are kept as they are.
    """

    label: str
    lines: tuple[str, ...]
    style: str = ""
    table: bool = False


def blocks(diagnosis: Diagnosis, files: Mapping[str, str], *, asked: bool = False) -> list[Block]:
    """Return what is shown of a diagnosis.

    Args:
        diagnosis: the answer.
        files: what was written, name to path.
        asked: show how a second pass is made, though it may tell nothing new.
    """
    answer = answer_of(diagnosis)
    shown = [Block(label="", lines=(answer.headline,), style=_STYLES[diagnosis.status])]
    cause, first = answer.cause, answer.first
    if first is not None:
        name = f"{phrases.record_name(first.key)}   {phrases.ranks_text(first.held_by or first.ranks)}"
        shown.append(Block(label="first", lines=(name, phrases.difference(first)), style="bold"))
        shown.append(Block(label="inputs", lines=(first.inputs,)))
    if cause is not None:
        shown += _cause_blocks(cause, "cause", first.inputs if first else "")
    shown.append(Block(label="also", lines=(answer.others, *phrases.origin_lines(diagnosis, cause))))
    shown += [block for finding in answer.rest for block in finding_blocks(finding)]
    table = () if same(diagnosis.scalars) else tuple(loss_table(diagnosis.scalars))
    shown.append(Block(label="log", lines=table, table=True))
    shown.append(Block(label="coverage", lines=(phrases.coverage_text(diagnosis),)))
    shown.append(Block(label="policy", lines=(phrases.policy_text(diagnosis),)))
    shown.append(Block(label="huawei", lines=(phrases.acceptance_text(diagnosis),)))
    shown.append(Block(label="notes", lines=diagnosis.notes))
    shown += _next_blocks(diagnosis, files.get("refine", ""), asked=asked)
    shown += _file_blocks(files)
    return [block for block in shown if any(block.lines)]


def _cause_blocks(finding: Finding, label: str, already_said: str) -> list[Block]:
    lines = [f"{finding.title} ({certainty(finding)})  [{finding.id}]"]
    lines += [f"  {line}" for line in finding.evidence if line != already_said]
    replayed = finding.replay
    shown = [Block(label=label, lines=tuple(lines), style="bold")]
    if replayed is not None:
        recipes = (
            part
            for line in phrases.replay_lines(replayed)
            for part in textwrap.wrap(
                f"  {line}", _WIDEST - _MARGIN - _LABEL, subsequent_indent="  ", break_on_hyphens=False
            )
        )
        shown.append(Block(label="", lines=tuple(recipes), table=True))
        shown.append(Block(label="judgement", lines=(phrases.judgement(replayed),)))
    shown.append(Block(label="remedy", lines=(finding.remedy,), style="bold"))
    return shown


def finding_blocks(finding: Finding) -> list[Block]:
    """Return what is shown of a finding that is not the cause of the first divergence."""
    if finding.severity is Severity.ERROR:
        return _cause_blocks(finding, "cause", "")
    lines = [f"{finding.title}  [{finding.id}]", *(f"  {line}" for line in finding.evidence)]
    if finding.severity is Severity.WARNING:
        lines.append(f"  remedy: {finding.remedy}")
    return [Block(label=finding.severity.value, lines=tuple(lines))]


def _file_blocks(files: Mapping[str, str]) -> list[Block]:
    """Name what was written, the report last; say so where it was not."""
    others = tuple(path for name, path in files.items() if name != "report")
    report = files.get("report", MISSING_JINJA if "markdown" in files else "")
    return [Block(label="files", lines=others), Block(label="report", lines=(report,), style="bold")]


def _next_blocks(diagnosis: Diagnosis, config: str, *, asked: bool) -> list[Block]:
    """Say how a second pass is made; commands are not wrapped, so that they can be copied."""
    refinement = diagnosis.refinement
    if refinement is None or not config or not (asked or refinement.wanted):
        return []
    sentence, *commands = next_lines(refinement, diagnosis, config)
    return [
        Block(label="next", lines=(sentence,), style="bold"),
        Block(label="", lines=tuple(commands), table=True),
    ]


def render(
    diagnosis: Diagnosis,
    files: Mapping[str, str] | None = None,
    *,
    width: int = _WIDEST,
    asked: bool = False,
) -> str:
    """Return the verdict as plain text.

    Args:
        diagnosis: the answer.
        files: what was written, name to path.
        width: of the terminal, in characters.
        asked: as in ``blocks``.
    """
    shown = blocks(diagnosis, files or {}, asked=asked)
    return "\n".join(line for block in shown for line in _plain(block, width)) + "\n"


def _plain(block: Block, width: int) -> list[str]:
    if not block.label and not block.table:
        return [*textwrap.wrap(block.lines[0], width), ""]
    lines = []
    for number, text in enumerate(block.lines):
        label = block.label if number == 0 else ""
        margin = " " * _MARGIN + label.ljust(_LABEL)
        inner = len(text) - len(text.lstrip())
        indent = " " * (_MARGIN + _LABEL + inner)
        first = margin + " " * inner
        wrapped = (
            [text.strip()]
            if block.table
            else textwrap.wrap(
                text.strip(), max(width - len(indent), 40), break_long_words=False, break_on_hyphens=False
            )
        )
        if block.table:
            wrapped, indent, first = [text], "", margin
        lines += [(first if position == 0 else indent) + part for position, part in enumerate(wrapped)]
    return lines


def show(
    diagnosis: Diagnosis,
    files: Mapping[str, str] | None = None,
    *,
    stream: TextIO | None = None,
    asked: bool = False,
) -> None:
    """Print what ``blocks`` gives: coloured on a terminal where rich is installed, else plain."""
    print_blocks(blocks(diagnosis, files or {}, asked=asked), stream)


def print_blocks(shown: Sequence[Block], stream: TextIO | None = None) -> None:
    """Print blocks: coloured on a terminal where rich is installed, else plain."""
    out = stream or sys.stdout
    width = min(shutil.get_terminal_size((_WIDEST, 40)).columns, _WIDEST)
    if not out.isatty() or importlib.util.find_spec("rich") is None:
        lines = (one_line(line) for block in shown for line in _plain(block, width))
        out.write("\n".join(lines) + "\n")
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=out, highlight=False, soft_wrap=True)
    for block in shown:
        for number, line in enumerate(map(one_line, _plain(block, width))):
            text = Text(line, style=block.style if number == 0 else "")
            if block.label and number == 0:
                text = Text(line[: _MARGIN + _LABEL], style="cyan") + Text(
                    line[_MARGIN + _LABEL :], style=block.style
                )
            console.print(text)
