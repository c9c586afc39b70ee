"""``verdict.json``: the contract for machines, schema 1."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from mindspeed_precision.records import Acceptance, Diagnosis, Finding, Origin, Refinement, Replay

SCHEMA = 1


def verdict(diagnosis: Diagnosis, *, config: str = "") -> dict[str, Any]:
    """Return the diagnosis as plain data.

    Args:
        diagnosis: the answer.
        config: path of the settings of a second pass, where they were written.

    Returns:
        ``schema``, ``status``, ``runs``, ``first_divergence``, ``findings``, ``coverage`` as the design fixes
        them,
        and beside them ``origins``, ``refine``, ``scalars``, ``steps``, ``policy``, ``decided``,
        ``diverged``, ``huawei`` (what Ascend's acceptance criterion says of the same records), ``notes``.
        ``refine`` is null, or ``config`` (path), and what a run with it will keep:
        ``records`` with elements, ``bytes`` in all.
        Numbers that JSON lacks are the texts ``nan``, ``inf`` and ``-inf``.
    """
    first = diagnosis.first_divergence
    plain = {
        "schema": SCHEMA,
        "status": diagnosis.status.value,
        "runs": {"baseline": diagnosis.baseline, "candidate": diagnosis.candidate},
        "first_divergence": None if first is None else _origin(first),
        "findings": [finding_json(finding) for finding in diagnosis.findings],
        "coverage": asdict(diagnosis.coverage),
        "origins": [_origin(origin) for origin in diagnosis.origins],
        "refine": _refine(diagnosis.refinement, config),
        "scalars": [asdict(row) for row in diagnosis.scalars],
        "steps": list(diagnosis.steps),
        "policy": diagnosis.policy,
        "decided": {verdict.value: count for verdict, count in diagnosis.decided.items()},
        "diverged": diagnosis.diverged,
        "huawei": None if diagnosis.acceptance is None else _acceptance(diagnosis.acceptance),
        "notes": list(diagnosis.notes),
    }
    cleaned = jsonable(plain)
    assert isinstance(cleaned, dict)
    return cleaned


def verdict_text(diagnosis: Diagnosis, *, config: str = "") -> str:
    """Return the content of ``verdict.json``; ``config`` as in ``verdict``."""
    return json.dumps(verdict(diagnosis, config=config), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _acceptance(acceptance: Acceptance) -> dict[str, Any]:
    first = acceptance.first_failed
    return {
        "status": acceptance.status.value,
        "demands": acceptance.title,
        "records": {judgement.value: number for judgement, number in acceptance.records.items()},
        "first_failed": None if first is None else {"record": first.describe(), "reason": acceptance.reason},
        "loss": {
            "status": acceptance.loss.value,
            "mean_relative_error": acceptance.loss_error,
            "limit": acceptance.loss_limit,
        },
    }


def _refine(refinement: Refinement | None, config: str) -> dict[str, Any] | None:
    if refinement is None or not config:
        return None
    return {"config": config, "records": refinement.records, "bytes": refinement.bytes}


def _origin(origin: Origin) -> dict[str, Any]:
    key = origin.key
    return {
        "step": key.step,
        "microbatch": key.microbatch,
        "phase": key.phase.value,
        "fqn": key.fqn,
        "role": key.role.value,
        "slot": key.slot,
        "occurrence": key.occurrence,
        "ranks": list(origin.held_by or origin.ranks),
        "origin": True,
        "verdict": origin.comparison.verdict.value,
        "reason": origin.comparison.reason,
        "inputs": origin.inputs,
        "own_fault": origin.own,
        "propagated": origin.propagated,
        "metrics": dict(origin.comparison.metrics),
    }


def finding_json(finding: Finding) -> dict[str, Any]:
    """Return a finding as plain data."""
    return {
        "id": finding.id,
        "severity": finding.severity.value,
        "confidence": finding.confidence,
        "title": finding.title,
        "evidence": list(finding.evidence),
        "remedy": finding.remedy,
        "proved_by_replay": finding.proved_by_replay,
        "where": None if finding.where is None else finding.where.describe(),
        "explains": len(finding.explains),
        "replay": None if finding.replay is None else _replay(finding.replay),
    }


def _replay(replay: Replay) -> dict[str, Any]:
    return {
        "record": replay.key.describe(),
        "rank": replay.rank,
        "elements": replay.elements,
        "environment": replay.environment,
        "recipes": [
            {
                "recipe": recipe.recipe,
                "baseline_mismatched": recipe.baseline_mismatched,
                "candidate_mismatched": recipe.candidate_mismatched,
                "recorded_for": [side.value for side in recipe.recorded_for],
            }
            for recipe in replay.recipes
        ],
        "baseline_error": replay.baseline_error,
        "candidate_error": replay.candidate_error,
        "proved": replay.proved,
    }


def jsonable(value: Any) -> Any:
    """Return plain data as JSON can hold it: NaN and infinities become texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return value


__all__ = ["SCHEMA", "finding_json", "jsonable", "verdict", "verdict_text"]
