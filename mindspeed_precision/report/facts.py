"""Everything that a report says of two runs; console, ``report.html`` and ``report.md`` are made from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspeed_precision.align.lanes import describe_layout
from mindspeed_precision.align.mapping import Mapping as NameMapping
from mindspeed_precision.counting import count
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.errors import PrecisionError
from mindspeed_precision.fold.folding import Folded
from mindspeed_precision.records import INIT_STEP, Diagnosis, Side
from mindspeed_precision.report.answer import Answer, answer_of
from mindspeed_precision.report.curves import Curves, curves_of
from mindspeed_precision.report.growth import Growth, growth_of
from mindspeed_precision.report.operands import Gemm, divergent_gemms
from mindspeed_precision.report.training import Training, training_of


@dataclass(frozen=True, kw_only=True)
class RunCard:
    """One run in a few words.

    Attributes:
        path: its directory.
        about: what is known of it, name to text.
        notes: what a reader must know of it: ranks that are missing or did not end, records lost.
    """

    path: str
    about: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ReportFacts:
    """The facts of a report.

    Attributes:
        diagnosis: the answer.
        answer: what of it is said first.
        runs: by side.
        curves: loss and grad norm.
        growth: error along depth.
        gemms: products that are origins, with their operands.
        training: what both runs were given to do; None where that could not be gathered.
        gaps: what could not be gathered, and why.
    """

    diagnosis: Diagnosis
    answer: Answer
    runs: Mapping[Side, RunCard]
    curves: Curves
    growth: Growth
    gemms: tuple[Gemm, ...]
    training: Training | None = None
    gaps: tuple[str, ...] = ()


def report_facts(
    diagnosis: Diagnosis,
    runs: Mapping[Side, Run] | None = None,
    mappings: Sequence[NameMapping] = (),
    *,
    folded: Folded | None = None,
) -> ReportFacts:
    """Gather what a report says.

    Args:
        diagnosis: the answer.
        runs: as they were read; None: what only they tell is a gap of the report, and said there.
        mappings: names and conventions that differ between them.
        folded: for which ranks those of the runs stand; None: for themselves.
    """
    training, gaps = None, []
    if folded is not None:
        gaps.append(
            f"{folded.describe()}: the table of comparisons, the map of records and what was checked of data "
            "and weights are of these"
        )
    if runs is None:
        gaps.append("the runs were not at hand: parameter groups, configuration and checks are not shown")
    else:
        try:
            shown = runs if folded is None else dict(zip(Side, folded.shown, strict=True))
            training = training_of(shown[Side.BASELINE], shown[Side.CANDIDATE], mappings)
        except PrecisionError as error:
            gaps.append(f"parameter groups, configuration and checks could not be compared: {error}")
    whole = runs if folded is None else dict(zip(Side, folded.whole, strict=True))
    paths = {Side.BASELINE: diagnosis.baseline, Side.CANDIDATE: diagnosis.candidate}
    return ReportFacts(
        diagnosis=diagnosis,
        answer=answer_of(diagnosis),
        runs={
            side: _card(whole[side]) if whole is not None else RunCard(path=path)
            for side, path in paths.items()
        },
        curves=curves_of(diagnosis, runs or {}),
        growth=growth_of(diagnosis),
        gemms=divergent_gemms(diagnosis),
        training=training,
        gaps=tuple(gaps),
    )


def _card(run: Run) -> RunCard:
    manifest = run.manifest
    framework = _mapping(manifest.get("framework"))
    level = _mapping(_mapping(manifest.get("settings")).get("capture")).get("level")
    steps = sorted({step for rank in run.ranks.values() for step in rank.steps} - {INIT_STEP})
    declared = {p.fqn: p for rank in run.ranks.values() for p in rank.parameters if not p.tied_to}
    elements = sum(math.prod(p.placement.shape if p.placement else p.shape) for p in declared.values())
    ranks = len(run.ranks)
    about = {
        "framework": " ".join(str(framework[name]) for name in ("name", "version") if framework.get(name)),
        "layout": f"{describe_layout(run)} ({ranks} rank{'' if ranks == 1 else 's'} recorded)",
        "steps": _span(steps),
        "level": str(level or ""),
        "model": f"{count(len(declared), 'parameter')}, {count(elements, 'element')}" if declared else "",
        "recorded": str(manifest.get("created") or ""),
        "label": str(manifest.get("label") or ""),
        "noise": run.perturbed,
    }
    return RunCard(
        path=str(run.path), about={name: text for name, text in about.items() if text}, notes=run.notes
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _span(steps: Sequence[int]) -> str:
    if not steps:
        return "none whole"
    if len(steps) == 1:
        return str(steps[0])
    whole = steps[-1] - steps[0] + 1 == len(steps)
    return f"{steps[0]} to {steps[-1]}" + ("" if whole else f" ({len(steps)} of them)")
