"""``report.md``: the same facts for a pull request or an issue, as text that no name can break out of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from mindspeed_precision.counting import count
from mindspeed_precision.records import Finding, Severity, Side, StepScalars
from mindspeed_precision.report import phrases
from mindspeed_precision.report.answer import certainty
from mindspeed_precision.report.facts import ReportFacts
from mindspeed_precision.report.loss_table import first_difference
from mindspeed_precision.report.training import Training
from mindspeed_precision.report.visible import visible_text

MOST_ROWS = 12
MOST_LINES = 8

_SPECIAL = re.compile(r"([\\`*\[\]<>|~&$]|(?<![^\W_])_|_(?![^\W_]))")
_AT_START = re.compile(r"^([-+=:#]|\d+(?=[.)]))")
_LINKED = re.compile(r"@\w|#\d|GH-\d|://|www\.", re.IGNORECASE)
"""What GitHub and GitLab make a mention or a link of wherever it stands, but in code."""

_VALUE = r"'[^']*'|[\w.]+=\[[^\]]*\]|[\w./]*[=/\d][^\s;]*[\w\]/}]|\d|[A-Z]+\b|[\w-]+\.yaml\b"
_COPIED = re.compile(rf"(`[^`]+`|--\w[\w-]*(?: (?:{_VALUE}))?)")
"""What a reader copies: what stands in backticks, or a flag and its value."""


def plain(text: str) -> str:
    """Return a text in which no character means anything to Markdown, on one line."""
    words = visible_text(text).split()
    line = " ".join(code(word) if _LINKED.search(word) else _SPECIAL.sub(r"\\\1", word) for word in words)
    return _AT_START.sub(lambda found: found[1] + "\\" if found[1].isdigit() else "\\" + found[1], line)


def code(text: str) -> str:
    """Return a text as a code span: fenced by more backticks than are in it, pipes as a table has them."""
    line = " ".join(visible_text(text).split()) or " "
    longest = max((len(run) for run in re.findall(r"`+", line)), default=0)
    fence, space = "`" * (longest + 1), " " if "`" in line else ""
    return f"{fence}{space}{line}{space}{fence}".replace("|", r"\|")


def prose(text: str) -> str:
    """Return a text as ``plain`` does, but what can be copied as code: flags with their value, backticks."""
    parts = re.split(_COPIED, text)
    done = [code(part.strip("`")) if number % 2 else _spaced(part) for number, part in enumerate(parts)]
    return "".join(done).strip()


def _spaced(text: str) -> str:
    """Return ``plain`` of a piece of a text, with the blanks around it."""
    before, after = (" " if text[:1].isspace() else ""), (" " if text[-1:].isspace() else "")
    return f"{before}{plain(text)}{after}" if text.strip() else before


def report_markdown(facts: ReportFacts) -> str:
    """Return the report as Markdown."""
    lines = [
        *_answer(facts),
        *_scalars(facts.curves.rows, facts),
        *_findings(facts.answer.rest),
        *_training(facts.training),
        *_coverage(facts),
    ]
    return "\n".join(lines) + "\n"


def _answer(facts: ReportFacts) -> Iterator[str]:
    answer = facts.answer
    yield f"## {plain(answer.sentence)}"
    yield ""
    if answer.scalars:
        yield plain(answer.scalars)
        yield ""
    rows = []
    if answer.first is not None:
        name = phrases.record_name(answer.first.key)
        ranks = phrases.ranks_text(answer.first.held_by or answer.first.ranks)
        rows.append(("first", f"{code(name)} {plain(ranks)}; {plain(phrases.difference(answer.first))}"))
        rows.append(("inputs", plain(answer.first.inputs)))
    if answer.cause is not None:
        rows += _cause(answer.cause)
    if answer.others:
        rows.append(("also", plain(answer.others)))
    if rows:
        yield from _table(("", ""), rows)
    if answer.cause is not None:
        yield from _evidence(answer.cause, answer.first.inputs if answer.first else "")
    yield from _runs(facts)


def _cause(cause: Finding) -> list[tuple[str, str]]:
    rows = [("cause", f"**{plain(cause.title)}** ({plain(certainty(cause))}) {code(cause.id)}")]
    if cause.remedy:
        rows.append(("remedy", prose(cause.remedy)))
    if cause.replay is not None:
        rows.append(("judgement", plain(phrases.judgement(cause.replay))))
    return rows


def _evidence(finding: Finding, already_said: str) -> Iterator[str]:
    evidence = [line for line in finding.evidence if line != already_said]
    yield from (f"- {plain(line)}" for line in evidence[:MOST_LINES])
    if len(evidence) > MOST_LINES:
        yield f"- and {len(evidence) - MOST_LINES} more"
    if evidence:
        yield ""
    if finding.replay is None:
        return
    rows = [
        (code(r.recipe), _mismatched(r.baseline_mismatched), _mismatched(r.candidate_mismatched))
        for r in finding.replay.recipes
    ]
    yield from _table(("recomputed as", "differs from the baseline in", "from the candidate in"), rows)


def _mismatched(number: int) -> str:
    return "**no element**" if number == 0 else count(number, "element")


def _runs(facts: ReportFacts) -> Iterator[str]:
    names = list(dict.fromkeys(name for side in Side for name in facts.runs[side].about))
    rows = [("run", *(code(facts.runs[side].path) for side in Side))]
    rows += [(name, *(plain(facts.runs[side].about.get(name, "")) for side in Side)) for name in names]
    yield from _table(("", "baseline", "candidate"), rows)


def _scalars(rows: Sequence[StepScalars], facts: ReportFacts) -> Iterator[str]:
    known = [name for name in ("loss", "grad_norm") if any(_both(row, name) != (None, None) for row in rows)]
    if not known:
        return
    scalars = facts.diagnosis.scalars
    firsts = {name: first_difference(scalars, name) for name in known}
    around = {step + near for step in firsts.values() if step is not None for near in (-1, 0, 1)}
    many = len(rows) > MOST_ROWS
    shown = [
        row for n, row in enumerate(rows) if not many or n < 2 or n > len(rows) - 3 or row.step in around
    ]
    titles = ["step", *(f"{name.replace('_', ' ')}, {side.value}" for name in known for side in Side), ""]
    table = []
    for row in shown:
        marks = [name.replace("_", " ") for name, step in firsts.items() if step == row.step]
        cells = [_number(value) for name in known for value in _both(row, name)]
        table.append((str(row.step), *cells, f"{' and '.join(marks)} differs from here" if marks else ""))
    if len(shown) < len(rows):
        yield f"{len(shown)} of {count(len(rows), 'step')}:"
        yield ""
    yield from _table(titles, table)


def _both(row: StepScalars, name: str) -> tuple[float | None, float | None]:
    if name == "loss":
        return row.baseline_loss, row.candidate_loss
    return row.baseline_grad_norm, row.candidate_grad_norm


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.9g}"


def _findings(findings: Iterable[Finding]) -> Iterator[str]:
    found = [finding for finding in findings if finding.severity is not Severity.INFO]
    if not found:
        return
    yield "### Other findings"
    yield ""
    for finding in found:
        yield f"- **{finding.severity.value}** {plain(finding.title)} {code(finding.id)}"
        yield from (f"  - {plain(line)}" for line in finding.evidence[:MOST_LINES])
        if len(finding.evidence) > MOST_LINES:
            yield f"  - and {len(finding.evidence) - MOST_LINES} more"
        if finding.remedy:
            yield f"  - remedy: {prose(finding.remedy)}"
    yield ""


def _training(training: Training | None) -> Iterator[str]:
    if training is None:
        return
    known = [one for one in training.differences if one.severity is not Severity.INFO]
    if known:
        yield f"### Configuration: {len(known)} of {training.arguments} arguments differ and may matter"
        yield ""
        rows = [
            (
                code(one.difference.name),
                code(str(one.difference.baseline)),
                code(str(one.difference.candidate)),
            )
            for one in known[:MOST_ROWS]
        ]
        yield from _table(("argument", "baseline", "candidate"), rows)
        yield from _more(len(known) - MOST_ROWS)
    if training.apart:
        yield f"### Parameters: {len(training.apart)} of {training.parameters} are not trained alike"
        yield ""
        parameters = [
            (code(one.fqn), plain(name), code(two[0]), code(two[1]))
            for one in training.apart[:MOST_ROWS]
            for name, two in one.cells.items()
        ]
        yield from _table(("parameter", "", "baseline", "candidate"), parameters)
        yield from _more(len(training.apart) - MOST_ROWS)


def _more(left: int) -> Iterator[str]:
    if left > 0:
        yield f"and {left} more"
        yield ""


def _coverage(facts: ReportFacts) -> Iterator[str]:
    diagnosis = facts.diagnosis
    yield "### Coverage"
    yield ""
    yield f"- {plain(phrases.coverage_text(diagnosis))}"
    yield f"- policy {plain(phrases.policy_text(diagnosis))}"
    accepted = phrases.acceptance_text(diagnosis)
    if accepted:
        yield f"- acceptance criterion of Ascend: {plain(accepted)}"
    outcomes = facts.training.outcomes if facts.training is not None else ()
    idle = [one for one in outcomes if one.skipped and one.applies]
    yield from (f"- not checked, or not wholly: {plain(f'{one.holds}: {one.skipped}')}" for one in idle)
    for unmatched in diagnosis.unmatched[:MOST_LINES]:
        yield f"- only the {unmatched.side.value} has {code(unmatched.key.describe())}"
    if len(diagnosis.unmatched) > MOST_LINES:
        yield f"- and {len(diagnosis.unmatched) - MOST_LINES} more records without a partner"
    yield from (f"- {plain(note)}" for note in (*diagnosis.notes, *facts.gaps))


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield f"|{' --- |' * len(titles)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""
