"""The facts as plain data, as the script of ``report.html`` reads them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from mindspeed_precision.compare.verdict import TOLERANCES
from mindspeed_precision.records import (
    Comparison,
    Finding,
    Phase,
    RecordKey,
    Replay,
    Role,
    Side,
    Verdict,
)
from mindspeed_precision.report import phrases
from mindspeed_precision.report.answer import certainty
from mindspeed_precision.report.details import detail, packed_details
from mindspeed_precision.report.facts import ReportFacts
from mindspeed_precision.report.grid import CODES, Grid, Row, grid_of
from mindspeed_precision.report.loss_table import first_difference
from mindspeed_precision.report.measures import LEVELS
from mindspeed_precision.report.packing import embedded, packed, packed_json

MOST_LISTED = 400
"""Unmatched records, parameters and arguments that are listed; beyond, their number is said."""

_PHASES = tuple(Phase)
_ROLES = tuple(Role)


def page_data(facts: ReportFacts, *, room: int) -> dict[str, Any]:
    """Return what the page shows.

    Args:
        facts: of the report.
        room: bytes that may be used; details of single pairs take what the rest leaves.
    """
    diagnosis = facts.diagnosis
    grid = grid_of(diagnosis.comparisons)
    plain: dict[str, Any] = {
        "status": diagnosis.status.value,
        "calm": facts.answer.calm,
        "runs": {side.value: asdict(card) for side, card in facts.runs.items()},
        "decided": {verdict.value: count for verdict, count in diagnosis.decided.items()},
        "compared": diagnosis.compared,
        "curves": _curves(facts),
        "growth": _growth(facts),
        "gemms": [_gemm(gemm.operands, gemm.origin.key) for gemm in facts.gemms],
        "training": _training(facts),
        "coverage": _coverage(facts),
        "grid": _grid(facts, grid),
    }
    chunks, taken = packed_details(diagnosis, grid, room=room - len(embedded(plain)))
    plain["details"] = {"chunks": chunks, "taken": taken, "cells": int((grid.worst >= 0).sum())}
    return plain


def _curves(facts: ReportFacts) -> dict[str, Any]:
    rows = facts.curves.rows
    scalars = facts.diagnosis.scalars
    return {
        "steps": [row.step for row in rows],
        "each": facts.curves.each,
        "compared": [facts.diagnosis.steps[0], facts.diagnosis.steps[-1]] if facts.diagnosis.steps else None,
        "loss": [[r.baseline_loss for r in rows], [r.candidate_loss for r in rows]],
        "grad_norm": [[r.baseline_grad_norm for r in rows], [r.candidate_grad_norm for r in rows]],
        "first": {name: first_difference(scalars, name) for name in ("loss", "grad_norm")},
        "divergence": facts.answer.first.key.step if facts.answer.first is not None else None,
    }


def _grid(facts: ReportFacts, grid: Grid) -> dict[str, Any]:
    names = list(dict.fromkeys(row.fqn for row in grid.rows))
    slots = list(dict.fromkeys(row.slot for row in grid.rows))
    name_at = {name: n for n, name in enumerate(names)}
    slot_at = {slot: n for n, slot in enumerate(slots)}
    rows = {
        "name": [name_at[row.fqn] for row in grid.rows],
        "slot": [slot_at[row.slot] for row in grid.rows],
        "phase": [_PHASES.index(row.phase) for row in grid.rows],
        "role": [_ROLES.index(row.role) for row in grid.rows],
        "rank": [row.rank for row in grid.rows],
        "microbatch": [row.microbatch for row in grid.rows],
        "occurrence": [row.occurrence for row in grid.rows],
        "recomputed": [int(row.recomputed) for row in grid.rows],
    }
    return {
        "columns": [list(column) for column in grid.columns],
        "size": [len(grid.rows), len(grid.columns)],
        "phases": [phase.value for phase in _PHASES],
        "roles": [role.value for role in _ROLES],
        "verdicts": ["none", *(verdict.value for verdict in CODES)],
        "levels": list(LEVELS),
        "rows": packed_json({"names": names, "slots": slots, **rows}),
        "cells": packed(grid.cells.tobytes()),
        "origins": _origins(facts, grid),
        "folded": list(grid.folded),
        "tolerates": any(TOLERANCES in one.metrics for one in facts.diagnosis.comparisons),
    }


def _origins(facts: ReportFacts, grid: Grid) -> list[dict[str, Any]]:
    """Return the origins with the cell that shows each; where it was put together with others, none."""
    places = {_place(row): n for n, row in enumerate(grid.rows)}
    found = []
    for origin in facts.diagnosis.origins[:MOST_LISTED]:
        key = origin.key
        row = Row(
            rank=origin.ranks[0],
            microbatch=key.microbatch,
            phase=key.phase,
            fqn=key.fqn,
            role=key.role,
            slot=key.slot,
            occurrence=key.occurrence,
            recomputed=key.recomputed,
        )
        found.append(
            {
                "cell": [places.get(_place(row), -1), grid.column_of(key.step)],
                "name": phrases.record_name(key),
                "moment": phrases.moment(key),
                "ranks": phrases.ranks_text(origin.held_by or origin.ranks),
                "inputs": origin.inputs,
                "difference": phrases.difference(origin),
                "propagated": origin.propagated,
            }
        )
    return found


def _place(row: Row) -> tuple[Any, ...]:
    return tuple(getattr(row, name) for name in Row.__annotations__)


def _growth(facts: ReportFacts) -> dict[str, Any]:
    growth = facts.growth
    return {
        "modules": list(growth.modules),
        "steps": list(growth.steps),
        "left_out": growth.left_out,
        "points": {
            f"{step} {series}": [
                [point.module, point.error, CODES[point.verdict], int(point.estimated)] for point in points
            ]
            for (step, series), points in growth.points.items()
        },
    }


def _gemm(operands: Iterable[Comparison], key: RecordKey) -> dict[str, Any]:
    return {
        "name": key.fqn,
        "moment": phrases.moment(key),
        "operands": [[one.key.role.value, one.verdict.value, *detail(one, -1, -1)] for one in operands],
    }


def _training(facts: ReportFacts) -> dict[str, Any] | None:
    training = facts.training
    if training is None:
        return None
    return {
        "groups": {side.value: [asdict(group) for group in training.groups[side]] for side in Side},
        "parameters": training.parameters,
        "apart": [asdict(one) for one in training.apart[:MOST_LISTED]],
        "apart_in_all": len(training.apart),
        "arguments": training.arguments,
        "differences": [
            {
                "name": one.difference.name,
                "baseline": _said(one.difference.baseline),
                "candidate": _said(one.difference.candidate),
                "where": list(one.difference.sections),
                "severity": one.severity.value if one.severity else "unknown",
                "reason": one.reason,
            }
            for one in training.differences[:MOST_LISTED]
        ],
        "differences_in_all": len(training.differences),
    }


def _said(value: Any) -> str:
    return "not set" if value is None else str(value)


def _coverage(facts: ReportFacts) -> dict[str, Any]:
    diagnosis = facts.diagnosis
    outcomes = facts.training.outcomes if facts.training is not None else ()
    return {
        **asdict(diagnosis.coverage),
        "text": phrases.coverage_text(diagnosis),
        "policy": phrases.policy_text(diagnosis),
        "huawei": phrases.acceptance_text(diagnosis),
        "unjudged": [
            [phrases.record_name(c.key), phrases.moment(c.key), c.reason]
            for c in diagnosis.comparisons
            if c.verdict in (Verdict.MISSING, Verdict.INCOMPARABLE)
        ][:MOST_LISTED],
        "unmatched_list": [
            [
                u.side.value,
                phrases.record_name(u.key),
                phrases.moment(u.key),
                u.rank,
                [k.describe() for k in u.closest],
            ]
            for u in diagnosis.unmatched[:MOST_LISTED]
        ],
        "checks": [asdict(outcome) for outcome in outcomes],
        "findings": [finding(one) for one in facts.answer.rest],
        "notes": [*diagnosis.notes, *facts.gaps],
    }


def finding(one: Finding) -> dict[str, Any]:
    """Return a finding as the page shows it."""
    return {
        "id": one.id,
        "severity": one.severity.value,
        "certainty": certainty(one),
        "title": one.title,
        "evidence": list(one.evidence),
        "remedy": one.remedy,
        "proof": _proof(one.replay),
    }


def _proof(replay: Replay | None) -> dict[str, Any] | None:
    if replay is None:
        return None
    return {
        "record": replay.key.describe(),
        "elements": replay.elements,
        "environment": replay.environment,
        "recipes": [
            {
                "recipe": recipe.recipe,
                "baseline": recipe.baseline_mismatched,
                "candidate": recipe.candidate_mismatched,
                "recorded_for": [side.value for side in recipe.recorded_for],
            }
            for recipe in replay.recipes
        ],
        "proved": replay.proved,
        "judgement": phrases.judgement(replay),
    }
