"""What a worker does: read some ranks of both runs, and say of each what its comparison shows."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
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
from mindspeed_precision.fold.ranges import PieceOutcome, Ranged, ranged, same_ranges, shown_ranges
from mindspeed_precision.fold.rank_lines import Positions, RankLines, read_lines
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
        counts: by step, how many records it has.
        notes: what a reader must know of it.
    """

    coordinates: RankCoordinates
    steps: tuple[int, ...]
    microbatches: Mapping[int, int]
    findings: tuple[Any, ...]
    counts: Mapping[int, int]
    notes: tuple[str, ...] = ()

    @property
    def records(self) -> int:
        """How many records it has."""
        return sum(self.counts.values())


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
        late: among them is the parameter after a step.
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
    late: bool = False


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
    tried = [
        _tried(path / rank_directory(rank), rank, late=task.late) if there else (None, None)
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
    if (one.ranged is None) != (two.ranged is None):
        reason = "the optimizer of one run alone is distributed"
    if one.ranged is not None and two.ranged is not None and not same_ranges(one.ranged, two.ranged):
        reason = "it has other ranges in the other run"
    if reason or one.lines is None or two.lines is None or one.template is None or two.template is None:
        return replace(outcome, reason=reason), None
    static = _static(one, two)
    sides = Sides(
        lines=(one.lines, two.lines),
        templates=(one.template, two.template),
        matched=_matched(one, two),
        static=static,
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
        ranges=tuple(shown_ranges(one.ranged, two.ranged, static, task.policy))
        if one.ranged is not None and two.ranged is not None
        else (),
        late=task.late,
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
    ranged: Ranged | None = None


def _tried(directory: Path, rank: int, *, late: bool) -> tuple[_Read | None, DumpError | None]:
    try:
        return _read(directory, rank, late=late), None
    except DumpError as error:
        return None, error


def _read(directory: Path, rank: int, *, late: bool) -> _Read | None:
    lines = read_lines(directory, late=late)
    if lines is None or lines.coordinates.rank != rank:
        return _read_strictly(directory, rank)
    divided, counts = lines.divided, lines.counts
    ranges = None if divided is None else ranged(directory, lines)
    at = None if divided is None else divided.shared
    if divided is not None:
        lines = lines.of(divided.shared, divided.template)
    template = _TEMPLATES.get(directory, lines, at)
    if template is None or (divided is not None and ranges is None):
        return _read_strictly(directory, rank)
    return _Read(
        outcome=SideOutcome(
            coordinates=lines.coordinates,
            steps=template.steps,
            microbatches=template.microbatches,
            findings=load_findings(directory),
            counts=counts,
        ),
        reason=template.reason,
        lines=lines,
        template=template,
        effective=_effective(directory, divided=divided is not None),
        ranged=ranges,
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
            counts=Counter(record.key.step for record in found.records),
            notes=found.notes,
        ),
        reason="it did not end as planned, or lost records",
    )


class _Templates:
    """The templates that a worker met last."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Template | None] = OrderedDict()
        self._pairs: dict[tuple[bytes, bytes], Matched] = {}

    def get(self, directory: Path, lines: RankLines, at: Positions | None) -> Template | None:
        """Return the template of lines, those of a rank at some positions; a new one is read strictly."""
        if lines.template in self._known:
            self._known.move_to_end(lines.template)
            return self._known[lines.template]
        rank = load_rank(directory)
        if rank is not None and at is not None:
            rank = replace(rank, records=tuple(rank.records[number] for number in at.tolist()))
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


def _matched(one: _Read, two: _Read) -> Matched:
    return _TEMPLATES.matched(one, two)


def _effective(directory: Path, *, divided: bool) -> bytes:
    """Return what the rank's objects held, as a digest: without what its ranges are where it has some."""
    path = directory / EFFECTIVE
    if not path.exists():
        return b""
    data = read_inside(path, directory.parent)
    _check_effective(data, str(path))
    if divided:
        data = _without_ranges(data)
    return hashlib.blake2b(data, digest_size=16).digest()


@lru_cache(maxsize=64)
def _without_ranges(data: bytes) -> bytes:
    plain = load_object(data, where=EFFECTIVE)
    groups = [(group["optimizer"], group["settings"]) for group in plain["groups"]]
    return repr((groups, plain["tied"], plain["modules"])).encode()


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
