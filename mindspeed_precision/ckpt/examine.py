"""``ckpt A B``: two checkpoints in, an examination out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_precision.align.mapping import Mapping, load_mapping
from mindspeed_precision.ckpt import rest_checks, weight_checks
from mindspeed_precision.ckpt.facts import CKPT, Facts
from mindspeed_precision.ckpt.lines import layer_lines, parameter_lines, state_lines, summary
from mindspeed_precision.ckpt.opening import open_checkpoint
from mindspeed_precision.ckpt.pairing import named, with_mappings
from mindspeed_precision.ckpt.results import Compared, compared
from mindspeed_precision.ckpt.stored import Checkpoint
from mindspeed_precision.records import Examination, Side

_REGISTERED = (weight_checks, rest_checks)
"""The modules whose import registers the checks, in the order in which they are asked."""


@dataclass(frozen=True, kw_only=True)
class CheckpointAnswer:
    """The answer of ``ckpt``.

    Attributes:
        examination: findings, what was looked at, and tables.
        parameters: what was found about each parameter and each tensor of the optimizer, for machines.
    """

    examination: Examination
    parameters: tuple[dict[str, Any], ...]


def compare_checkpoints(
    baseline: str | Path,
    candidate: str | Path,
    *,
    mapping: Sequence[str | Path | Mapping] = (),
    every: bool = False,
) -> CheckpointAnswer:
    """Compare two checkpoints, parameter by parameter.

    Args:
        baseline: a checkpoint, or a run directory; the one to agree with.
        candidate: the same, of what is examined.
        mapping: mapping files for names that the shipped table does not know, or loaded ones.
        every: the tables also show what is identical.

    Returns:
        The findings, the tables, and every parameter.

    Raises:
        CheckpointError: one cannot be read.
        DumpError: a run directory cannot be read.
        ConfigError: a mapping file is none.
    """
    maps = [one if isinstance(one, Mapping) else load_mapping(one) for one in mapping]
    one, two = open_checkpoint(baseline), open_checkpoint(candidate)
    of_side = with_mappings(maps, one, two)
    found = compared(named(one, of_side[Side.BASELINE]), named(two, of_side[Side.CANDIDATE]))
    facts = Facts(compared=found)
    findings, outcomes = CKPT.ask_all(facts)
    tables = {
        "layers": layer_lines(found),
        "worst": parameter_lines(found, every=every),
        "optimizer": state_lines(found, every=every),
    }
    examination = Examination(
        command="ckpt",
        subjects={"baseline": str(baseline), "candidate": str(candidate)},
        findings=findings,
        outcomes=outcomes,
        notes=tuple(_notes(facts, found)),
        headline=summary(found, findings),
        tables={title: lines for title, lines in tables.items() if lines},
    )
    return CheckpointAnswer(examination=examination, parameters=tuple(r.plain() for r in found.results))


def _notes(facts: Facts, found: Compared) -> list[str]:
    notes = [_side("baseline", found.one.checkpoint), _side("candidate", found.two.checkpoint)]
    notes += [f"{checkpoint}: {note}" for checkpoint, note in _own_notes(found)]
    alone = facts.remainder.alone
    if alone:
        notes.append(f"saved by one side only, not compared: {', '.join(alone)}")
    if facts.configurations.alone:
        notes.append(f"{facts.configurations.alone} arguments are known of one side only")
    return notes


def _side(name: str, checkpoint: Checkpoint) -> str:
    iteration = checkpoint.rest.get("iteration")
    when = f", iteration {iteration}" if isinstance(iteration, int) else ""
    states = f", optimizer: {', '.join(checkpoint.states)}" if checkpoint.states else ""
    return f"{name}: {checkpoint.form}, {len(checkpoint.tensors)} tensors{states}{when}"


def _own_notes(found: Compared) -> list[tuple[str, str]]:
    sides = (("baseline", found.one.checkpoint), ("candidate", found.two.checkpoint))
    return [(name, note) for name, checkpoint in sides for note in checkpoint.notes]


__all__ = ["CheckpointAnswer", "compare_checkpoints"]
