"""What a worker does: read some ranks of both runs, and say of each what its comparison shows."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_precision.compare.policy import Policy
from mindspeed_precision.dump.effective import check_effective
from mindspeed_precision.dump.format import (
    EFFECTIVE,
    Parameters,
    PlaceDeclaration,
    parse_line,
    rank_directory,
)
from mindspeed_precision.dump.inside import read_inside
from mindspeed_precision.dump.reader import load_findings, load_rank, require_rank
from mindspeed_precision.dump.strict_json import load_object
from mindspeed_precision.errors import DumpError
from mindspeed_precision.fold.patterns import Shown, Sides, labels, shown_by
from mindspeed_precision.fold.rank_lines import RankLines, read_lines
from mindspeed_precision.fold.templates import Matched, Template, matched, template_of
from mindspeed_precision.records import Placement, RankCoordinates

_MOST_KEYS = 400_000
"""Records of all templates that a worker remembers."""


@dataclass(frozen=True, kw_only=True)
class SideOutcome:
    """One rank of one run, without its records.

    Attributes:
        coordinates: where it sits.
        steps: whole steps.
        microbatches: of each.
        findings: what it found while it ran.
        records: how many.
        notes: what a reader must know of it.
    """

    coordinates: RankCoordinates
    steps: tuple[int, ...]
    microbatches: Mapping[int, int]
    findings: tuple[Any, ...]
    records: int
    notes: tuple[str, ...] = ()


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


@dataclass(frozen=True, kw_only=True)
class ColumnTask:
    """Ranks that pass activations to each other: the stages of one pipeline.

    Attributes:
        paths: the run directories.
        ranks: ascending.
        present: of each, in which of the runs it is.
        policy: what counts as aligned; exact.
    """

    paths: tuple[Path, Path]
    ranks: tuple[int, ...]
    present: tuple[tuple[bool, bool], ...]
    policy: Policy


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
    tried = [
        _tried(path / rank_directory(rank), rank) if there else (None, None)
        for path, there in zip(task.paths, present, strict=True)
    ]
    (one, error), (two, other_error) = tried
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
    if reason or one.lines is None or two.lines is None or one.template is None or two.template is None:
        return replace(outcome, reason=reason), None
    sides = Sides(
        lines=(one.lines, two.lines),
        templates=(one.template, two.template),
        matched=_matched(one, two),
        static=_static(one, two),
    )
    shown = shown_by(sides, task.policy)
    found = replace(
        outcome,
        pattern=shown.pattern,
        reason="",
        place=shown.place,
        pairs=shown.pairs,
        differing=len(shown.differing),
        batches=shown.batches,
    )
    return found, shown


@dataclass(frozen=True, kw_only=True)
class _Read:
    """One rank of one run, as it was read."""

    outcome: SideOutcome
    reason: str = ""
    lines: RankLines | None = None
    template: Template | None = None
    effective: bytes = b""


def _tried(directory: Path, rank: int) -> tuple[_Read | None, DumpError | None]:
    try:
        return _read(directory, rank), None
    except DumpError as error:
        return None, error


def _read(directory: Path, rank: int) -> _Read | None:
    lines = read_lines(directory)
    template = None if lines is None else _template(directory, lines)
    if lines is None or template is None or lines.coordinates.rank != rank:
        return _read_strictly(directory, rank)
    return _Read(
        outcome=SideOutcome(
            coordinates=lines.coordinates,
            steps=template.steps,
            microbatches=template.microbatches,
            findings=load_findings(directory),
            records=len(lines.first),
        ),
        reason=template.reason,
        lines=lines,
        template=template,
        effective=_effective(directory),
    )


def _read_strictly(directory: Path, rank: int) -> _Read | None:
    found = load_rank(directory)
    if found is None:
        return None
    require_rank(found, rank)
    return _Read(
        outcome=SideOutcome(
            coordinates=found.coordinates,
            steps=found.steps,
            microbatches=found.microbatches,
            findings=found.findings,
            records=len(found.records),
            notes=found.notes,
        ),
        reason="it did not end as planned, or lost records",
    )


class _Templates:
    """The templates that a worker met last."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Template | None] = OrderedDict()
        self._pairs: dict[tuple[bytes, bytes], Matched] = {}

    def get(self, directory: Path, lines: RankLines) -> Template | None:
        """Return the template of some lines; a new one is read strictly."""
        if lines.template in self._known:
            self._known.move_to_end(lines.template)
            return self._known[lines.template]
        rank = load_rank(directory)
        found = None if rank is None else template_of(rank, lines)
        self._known[lines.template] = found
        while sum(len(one.keys) for one in self._known.values() if one is not None) > _MOST_KEYS:
            self._known.popitem(last=False)
            self._pairs.clear()
        return found

    def matched(self, one: _Read, two: _Read) -> Matched:
        """Match the records of both runs."""
        assert one.lines is not None
        assert two.lines is not None
        assert one.template is not None
        assert two.template is not None
        names = one.lines.template, two.lines.template
        if names not in self._pairs:
            self._pairs[names] = matched(one.template, two.template)
        return self._pairs[names]


_TEMPLATES = _Templates()


def _template(directory: Path, lines: RankLines) -> Template | None:
    return _TEMPLATES.get(directory, lines)


def _matched(one: _Read, two: _Read) -> Matched:
    return _TEMPLATES.matched(one, two)


def _effective(directory: Path) -> bytes:
    path = directory / EFFECTIVE
    if not path.exists():
        return b""
    data = read_inside(path, directory.parent)
    _check_effective(data, str(path))
    return hashlib.blake2b(data, digest_size=16).digest()


_SOUND: set[bytes] = set()


def _check_effective(data: bytes, where: str) -> None:
    """Refuse what no recorder writes; the same bytes once."""
    name = hashlib.blake2b(data, digest_size=16).digest()
    if name not in _SOUND:
        check_effective(load_object(data, where=where), where=where)
        _SOUND.add(name)


def _static(one: _Read, two: _Read) -> bytes:
    """Return what both sides declare, without which elements a rank holds, and where they declare alike."""
    assert one.lines is not None
    assert two.lines is not None
    told = [_declared(one.lines.declared), _declared(two.lines.declared)]
    told += [_places(one.lines.places), _places(two.lines.places)]
    same = one.lines.declared == two.lines.declared, one.lines.places == two.lines.places
    alike = repr(same)
    if not all(same):  # ranks that part here stand for themselves by their own bytes
        alike += repr((one.lines.declared, two.lines.declared, one.lines.places, two.lines.places))
    where = one.lines.coordinates, two.lines.coordinates
    sizes = repr([(c.sizes(), c.pp_rank) for c in where])
    return b"\n".join([*told, alike.encode(), sizes.encode(), one.effective, two.effective])


@lru_cache(maxsize=1024)
def _declared(lines: tuple[bytes, ...]) -> bytes:
    told = []
    for text in lines:
        line = parse_line(text, where="parameters")
        assert isinstance(line, Parameters)
        told += [
            (p.fqn, p.shape, p.dtype, p.trainable, p.tied_to, _kind(p.placement)) for p in line.parameters
        ]
    return repr(told).encode()


@lru_cache(maxsize=1024)
def _places(lines: tuple[bytes, ...]) -> bytes:
    told = []
    for text in lines:
        line = parse_line(text, where="placement")
        assert isinstance(line, PlaceDeclaration)
        place = line.place
        told.append((line.number, _kind(place) if isinstance(place, Placement) else place.reason))
    return repr(told).encode()


def _kind(place: Placement | None) -> object:
    """Return all of a placement but for which elements of a split dimension the rank holds."""
    if place is None:
        return None
    dims = [split.dim for split in place.splits]
    return place.shape, place.local_shape, dims, place.whole, place.partial, place.copy_of
