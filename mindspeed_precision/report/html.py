"""``report.html``: one file that loads nothing; the answer as text, then a picture for each question."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import mindspeed_precision
from mindspeed_precision.records import Diagnosis, Verdict
from mindspeed_precision.report import phrases
from mindspeed_precision.report.facts import ReportFacts
from mindspeed_precision.report.packing import embedded
from mindspeed_precision.report.page_data import finding, page_data
from mindspeed_precision.report.refine_file import next_lines
from mindspeed_precision.report.visible import visible

MOST_BYTES = 1_900_000
"""Of the whole file; what is beyond is left out, and the page says so."""

SCRIPTS = (
    *("base", "inflate", "axes", "curves", "records", "heatmap", "detail", "histogram", "tree"),
    *("growth", "training", "operands", "coverage", "keys", "main"),
)

_SIGNS = {
    Verdict.IDENTICAL: "=",
    Verdict.WITHIN_TOLERANCE: "≈",
    Verdict.DIVERGED: "≠",
    Verdict.INCOMPARABLE: "?",
    Verdict.MISSING: "∅",
}
_WORDS = {Verdict.MISSING: "not certified"}

MISSING_JINJA = (
    "report.html was not written: jinja2 is not installed (pip install 'mindspeed-precision[report]')"
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the page.

    Attributes:
        id: of its element.
        short: in the bar.
        title: as a heading.
        says: what it shows, in one line.
        open: unfolded when the page opens.
    """

    id: str
    short: str
    title: str
    says: str
    open: bool = True


_PARTS = (
    ("curves", "Curves", "Loss and grad norm", "What both logs print, and how far apart it is."),
    (
        "heatmap",
        "Heat map",
        "Records over steps",
        "Every record in execution order, from the batch at the top to the optimizer at the bottom. "
        "Click a cell, or move with the arrow keys, to open the tensor.",
    ),
    (
        "tree",
        "Model",
        "The model",
        "The worst verdict of everything below a module, by pass. Click a cell to open its worst record.",
    ),
    (
        "growth",
        "Depth",
        "Error along depth",
        "How the error grows through the model: forward from left to right, backward from right to left.",
    ),
    (
        "distribution",
        "Distribution",
        "Distribution",
        "How many elements have which power of two; the baseline upwards, the candidate downwards, heights "
        "logarithmic.",
    ),
    (
        "groups",
        "Groups",
        "Parameter groups",
        "Parameters that are trained alike, by the number of their elements; an outlined block with ≠ has no "
        "equal on the other side.",
    ),
    (
        "configuration",
        "Configuration",
        "Configuration",
        "Arguments and configuration objects after the framework's own changes to them, by what a difference "
        "does.",
    ),
    (
        "operands",
        "GEMM",
        "Operands of the divergent GEMM",
        "The first elements with their addresses in memory, counted in elements; the line goes through them "
        "in the order of memory.",
    ),
    (
        "coverage",
        "Coverage",
        "Coverage, and what was not exercised",
        "What was compared, what could not be, and what nothing was recorded of.",
    ),
)
_CALM = frozenset({"curves", "coverage"})


def available() -> bool:
    """Tell whether the page can be written here."""
    return importlib.util.find_spec("jinja2") is not None


def report_html(facts: ReportFacts, *, config: str = "") -> str:
    """Return the page.

    Args:
        facts: of the report.
        config: path of the settings of a second pass, where they were written.
    """
    from jinja2 import Environment, StrictUndefined

    style = _asset("page.css")
    script = '"use strict";\n' + "\n".join(_asset(f"{name}.js") for name in SCRIPTS)
    skeleton = Environment(autoescape=True, undefined=StrictUndefined, finalize=_shown).from_string(
        _asset("report.html.j2")
    )
    fixed = len(style) + len(script) + 60_000
    data = page_data(facts, room=MOST_BYTES - fixed)
    return skeleton.render(
        **_answer(facts, config),
        policy=_policy(style, script),
        version=mindspeed_precision.__version__,
        style=_Raw(style),
        script=_Raw(script),
        data=_Raw(embedded(data)),
        parts=[Part(open=not facts.answer.calm or part[0] in _CALM, **_named(part)) for part in _PARTS],
    )


class _Raw(str):
    """Text of this package, or escaped already, that a template must not escape."""

    def __html__(self) -> str:
        return self


def _shown(value: Any) -> Any:
    return value if isinstance(value, _Raw) else visible(value)


def _named(part: tuple[str, str, str, str]) -> dict[str, Any]:
    return dict(zip(("id", "short", "title", "says"), part, strict=True))


def _answer(facts: ReportFacts, config: str) -> dict[str, Any]:
    diagnosis, answer = facts.diagnosis, facts.answer
    first = answer.first
    return {
        "answer": answer,
        "title": f"{_word(answer.status)}: {diagnosis.baseline} and {diagnosis.candidate}",
        "sign": _SIGNS[answer.status],
        "word": _word(answer.status),
        "sentence": _unbroken(sentence_of(answer.sentence)),
        "first": None
        if first is None
        else {
            "name": phrases.record_name(first.key),
            "ranks": phrases.ranks_text(first.held_by or first.ranks),
            "difference": phrases.difference(first),
            "inputs": first.inputs,
        },
        "cause": None if answer.cause is None else finding(answer.cause),
        "origins": [line.strip() for line in phrases.origin_lines(diagnosis, answer.cause)],
        "findings": [finding(one) for one in answer.rest],
        "steps_to_proof": list(_next(diagnosis, config)),
        "coverage": _unbroken(phrases.coverage_text(diagnosis)),
        "decided": _unbroken(phrases.policy_text(diagnosis)),
        "runs": [(side.value, card) for side, card in facts.runs.items()],
    }


def _unbroken(text: str) -> str:
    """Return a text in which no line ends within a number, or between it and what it counts."""
    whole = re.sub(r"(?<=\d) (?=\d{3}\b)", "\u202f", text)
    return re.sub(r"\b(step|microbatch|rank) (?=\d)", "\\1\u00a0", whole)


def sentence_of(sentence: str) -> str:
    """Return the verdict's sentence in plain letters: ``DIVERGED at step 0`` shouts in a headline."""
    head, separator, rest = sentence.partition(":")
    if separator and head.isupper():
        return f"{head.capitalize()}: {rest.strip()}"
    first, _, rest = sentence.partition(" ")
    return f"{first.capitalize()} {rest}"


def _word(status: Verdict) -> str:
    return _WORDS.get(status, status.value.replace("_", " "))


def _next(diagnosis: Diagnosis, config: str) -> Iterator[str]:
    refinement = diagnosis.refinement
    if refinement is not None and refinement.wanted and config:
        yield from next_lines(refinement, diagnosis, config)


def _asset(name: str) -> str:
    return (files("mindspeed_precision.report") / "page" / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Return a content security policy by which nothing runs and nothing loads but this style and script."""
    rules: Mapping[str, str] = {
        "default-src": "'none'",
        "style-src": _hash(style),
        "script-src": _hash(script),
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
    return f"'sha256-{digest}'"
