"""One rank of one run: read as columns, or by the strict reader where it may not stand for others."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindspeed_precision.dump.reader import load_findings, load_rank, require_rank
from mindspeed_precision.errors import DumpError
from mindspeed_precision.fold.declared import effective_of
from mindspeed_precision.fold.ranges import Ranged, ranged
from mindspeed_precision.fold.rank_lines import Positions, RankLines, read_lines
from mindspeed_precision.fold.templates import Matched, Template, matched, template_of
from mindspeed_precision.records import RankCoordinates

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
class OneSide:
    """One rank of one run, as it was read.

    Attributes:
        outcome: without its records.
        reason: why it stands for itself alone; empty where it may stand for others.
        lines: of it, without those of ranges; None: it was read by the strict reader.
        template: of these.
        effective: what its objects held, as a digest.
        ranged: its ranges; None: it has none.
    """

    outcome: SideOutcome
    reason: str = ""
    lines: RankLines | None = None
    template: Template | None = None
    effective: bytes = b""
    ranged: Ranged | None = None


def tried(directory: Path, rank: int, *, late: bool) -> tuple[OneSide | None, DumpError | None]:
    """Read a rank of one run; None where it wrote nothing, or the error that reading it gives."""
    try:
        return _read(directory, rank, late=late), None
    except DumpError as error:
        return None, error


def _read(directory: Path, rank: int, *, late: bool) -> OneSide | None:
    lines = read_lines(directory, late=late)
    if lines is None or lines.coordinates.rank != rank:
        return _read_strictly(directory, rank)
    divided, counts = lines.divided, lines.counts
    ranges = None if divided is None else ranged(directory, lines)
    at = None if divided is None else divided.shared
    if divided is not None:
        lines = lines.of(divided.shared, divided.template)
    template = TEMPLATES.get(directory, lines, at)
    if template is None or (divided is not None and ranges is None):
        return _read_strictly(directory, rank)
    return OneSide(
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
        effective=effective_of(directory, divided=divided is not None),
        ranged=ranges,
    )


def _read_strictly(directory: Path, rank: int) -> OneSide | None:
    found = load_rank(directory)
    if found is None:
        return None
    require_rank(found, rank)
    return OneSide(
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

    def matched(self, one: OneSide, two: OneSide) -> Matched:
        """Match the records of both runs."""
        assert one.lines is not None
        assert two.lines is not None
        assert one.template is not None
        assert two.template is not None
        names = one.lines.template, two.lines.template
        if names not in self._pairs:
            self._pairs[names] = matched(one.template, two.template)
        return self._pairs[names]


TEMPLATES = _Templates()
"""Those of this process."""
