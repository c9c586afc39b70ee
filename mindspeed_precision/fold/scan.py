"""What a worker does: read some ranks of both runs, and say of each what its comparison shows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mindspeed_precision.align.ranges import DIVIDED
from mindspeed_precision.compare.policy import Policy
from mindspeed_precision.dump.format import rank_directory
from mindspeed_precision.errors import DumpError
from mindspeed_precision.fold.declared import declared_by
from mindspeed_precision.fold.patterns import Shown, Sides, labels, shown_by
from mindspeed_precision.fold.ranges import PieceOutcome, same_ranges, shown_ranges
from mindspeed_precision.fold.reading import TEMPLATES, SideOutcome, tried

_OF_RANGES = {phase for phase, _ in DIVIDED}


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """One rank of both runs.

    Attributes:
        rank: its number.
        sides: baseline and candidate; None for a run that does not have it, or of which it wrote nothing.
        pattern: what its comparison shows; empty for a rank that stands for itself alone.
        reason: why it does.
        place: step and position of the first record that differs; None for none, or where that is not known.
        pairs: records with a partner.
        differing: how many of them differ.
        batches: by slot of the data and step, both sides' sums of unordered fingerprints.
        errors: what is wrong with the files of each side.
        present: in which of the runs it has a directory.
        ranges: what its ranges show, where the optimizer is distributed: all else here is of what is left.
    """

    rank: int
    sides: tuple[SideOutcome | None, SideOutcome | None]
    pattern: bytes = b""
    reason: str = ""
    place: tuple[int, int] | None = None
    pairs: int = 0
    differing: int = 0
    batches: Mapping[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    errors: tuple[DumpError | None, DumpError | None] = (None, None)
    present: tuple[bool, bool] = (True, True)
    ranges: tuple[PieceOutcome, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ColumnTask:
    """Ranks that pass activations to each other: the stages of one pipeline.

    Attributes:
        paths: the run directories.
        ranks: ascending.
        present: of each, in which of the runs it is.
        policy: what counts as aligned; exact.
        late: parameters are gathered beside the next forward (``align.ranges.is_divided``).
    """

    paths: tuple[Path, Path]
    ranks: tuple[int, ...]
    present: tuple[tuple[bool, bool], ...]
    policy: Policy
    late: bool = False


@dataclass(frozen=True, kw_only=True)
class ColumnOutcome:
    """What was found of a task.

    Attributes:
        ranks: in the order of the task.
        links: which records of them that differ have the same bits; empty where no rank stands for others.
    """

    ranks: tuple[RankOutcome, ...]
    links: bytes


def scan_column(task: ColumnTask) -> ColumnOutcome:
    """Read the ranks of a task, one at a time."""
    outcomes, differing = [], []
    for rank, present in zip(task.ranks, task.present, strict=True):
        outcome, shown = _scan_rank(task, rank, present)
        outcomes.append(outcome)
        if shown is not None:
            differing.append(shown.differing)
    links = b""
    if len(differing) == len(outcomes):
        links = hashlib.blake2b(labels(np.concatenate(differing)), digest_size=16).digest()
    return ColumnOutcome(ranks=tuple(outcomes), links=links)


def _scan_rank(task: ColumnTask, rank: int, present: tuple[bool, bool]) -> tuple[RankOutcome, Shown | None]:
    both = [
        tried(path / rank_directory(rank), rank, late=task.late) if there else (None, None)
        for path, there in zip(task.paths, present, strict=True)
    ]
    (one, error), (two, other_error) = both
    outcome = RankOutcome(
        rank=rank,
        sides=(None if one is None else one.outcome, None if two is None else two.outcome),
        reason="it is in one run alone",
        errors=(error, other_error),
        present=present,
    )
    if one is None or two is None:
        return outcome, None
    reason = one.reason or two.reason
    if one.outcome.coordinates != two.outcome.coordinates:
        reason = "it sits elsewhere in the other run"
    if (one.ranged is None) != (two.ranged is None):
        reason = "the optimizer of one run alone is distributed"
    if one.ranged is not None and two.ranged is not None and not same_ranges(one.ranged, two.ranged):
        reason = "it has other ranges in the other run"
    if reason or one.lines is None or two.lines is None or one.template is None or two.template is None:
        return replace(outcome, reason=reason), None
    static = b"\n".join([declared_by(one.lines, two.lines), one.effective, two.effective])
    sides = Sides(
        lines=(one.lines, two.lines),
        templates=(one.template, two.template),
        matched=TEMPLATES.matched(one, two),
        static=static,
    )
    ranges: tuple[PieceOutcome, ...] = ()
    if one.ranged is not None and two.ranged is not None:
        ranges = tuple(shown_ranges(one.ranged, two.ranged, static, task.policy))
        if any(piece.alone for piece in ranges) or _lacks_near(sides):
            return replace(outcome, reason="records at the time of its ranges have no partner"), None
    shown = shown_by(sides, task.policy)
    found = replace(
        outcome,
        pattern=shown.pattern,
        reason="",
        place=shown.place,
        pairs=shown.pairs,
        differing=len(shown.differing),
        batches=shown.batches,
        ranges=ranges,
    )
    return found, shown


def _lacks_near(sides: Sides) -> bool:
    """Tell whether a record without a partner may be shown beside those of ranges, which it resembles."""
    for template, at in zip(sides.templates, (sides.matched.one, sides.matched.two), strict=True):
        alone = np.setdiff1d(np.arange(len(template.keys)), at)
        if any(template.keys[number].phase in _OF_RANGES for number in alone.tolist()):
            return True
    return False
