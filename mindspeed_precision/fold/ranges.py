"""What the ranges of one rank show: each parameter's by itself, as if it were a rank of its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mindspeed_precision.align.ranges import unranged
from mindspeed_precision.compare.policy import Policy
from mindspeed_precision.dump.format import parse_line
from mindspeed_precision.errors import DumpError
from mindspeed_precision.fold.divided import RECORD, Piece
from mindspeed_precision.fold.patterns import Sides, shown_by
from mindspeed_precision.fold.rank_lines import RankLines
from mindspeed_precision.fold.templates import Positions, Template, matched, template_of_records
from mindspeed_precision.records import Role, TensorRecord

_MOST = 20_000
"""Templates of pieces that a worker remembers."""


@dataclass(frozen=True, kw_only=True)
class PieceOutcome:
    """The records of one parameter's range on one rank of both runs.

    Attributes:
        fqn: the parameter.
        pattern: what their comparison shows.
        place: step and position of the first record that differs; None for none.
        pairs: how many have a partner.
        differing: how many of them differ.
        alone: how many of both runs have none.
        linked: the parameter after a step is among them, whole, and differs: a module that is given it has
            its bits, which are those of one tensor-parallel rank.
    """

    fqn: str
    pattern: bytes
    place: tuple[int, int] | None
    pairs: int
    differing: int
    alone: int
    linked: bool = False


@dataclass(frozen=True, kw_only=True)
class Ranged:
    """One side of a rank with ranges.

    Attributes:
        lines: all of them.
        pieces: by parameter, with its template.
    """

    lines: RankLines
    pieces: dict[str, tuple[Piece, Template]]


class _Known:
    """The templates of pieces that a worker met last."""

    def __init__(self) -> None:
        self._found: OrderedDict[bytes, Template] = OrderedDict()

    def get(self, piece: Piece, lines: RankLines, records: dict[int, bytes], directory: Path) -> Template:
        """Return the template of a piece; a new one is parsed."""
        if piece.template not in self._found:
            if not records:
                whole = (line for line in lines.text.split(b"\n") if line.startswith(RECORD))
                records.update(enumerate(whole))
            self._found[piece.template] = _parsed([records[at] for at in piece.at.tolist()], directory)
            if len(self._found) > _MOST:
                self._found.popitem(last=False)
        self._found.move_to_end(piece.template)
        return replace(self._found[piece.template], numels=piece.numels)


_KNOWN = _Known()


def _parsed(lines: list[bytes], directory: Path) -> Template:
    records = []
    for text in lines:
        record = parse_line(text, where=str(directory))
        assert isinstance(record, TensorRecord)
        records.append(replace(record, key=unranged(record.key)))
    return template_of_records(records)


def ranged(directory: Path, lines: RankLines) -> Ranged | None:
    """Return the ranges of a rank; None where one may not stand for others, or is for the strict reader.

    Args:
        directory: of the rank.
        lines: of it, divided.
    """
    assert lines.divided is not None
    records: dict[int, bytes] = {}
    try:
        found = {
            piece.fqn: (piece, _KNOWN.get(piece, lines, records, directory)) for piece in lines.divided.pieces
        }
    except DumpError:
        return None
    if any(template.reason for _, template in found.values()):
        return None
    return Ranged(lines=replace(lines, text=b""), pieces=found)


def same_ranges(one: Ranged, two: Ranged) -> bool:
    """Tell whether both runs have the same ranges of the same parameters on a rank."""
    return one.pieces.keys() == two.pieces.keys() and all(
        piece.label == two.pieces[name][0].label for name, (piece, _) in one.pieces.items()
    )


def shown_ranges(one: Ranged, two: Ranged, static: bytes, policy: Policy) -> Iterator[PieceOutcome]:
    """Compare the ranges of one rank of both runs, parameter by parameter.

    Args:
        one: of the baseline.
        two: of the candidate; the same ranges.
        static: what both ranks declare.
        policy: what counts as aligned.
    """
    for name, (piece, template) in one.pieces.items():
        other, other_template = two.pieces[name]
        both = matched(template, other_template)
        sides = Sides(
            lines=(one.lines.of(piece.at, piece.template), two.lines.of(other.at, other.template)),
            templates=(template, other_template),
            matched=both,
            static=static,
        )
        own = piece.own[both.one]
        differs = own & (sides.lines[0].first[both.one] != sides.lines[1].first[both.two])
        first = next(iter(both.one[differs].tolist()), None)
        yield PieceOutcome(
            fqn=name,
            pattern=shown_by(sides, policy).pattern,
            place=None if first is None else (template.keys[first].step, int(piece.at[first])),
            pairs=int(np.count_nonzero(own)),
            differing=int(np.count_nonzero(differs)),
            linked=_linked(piece, template, both.one[differs]),
            alone=int(np.count_nonzero(piece.own) + np.count_nonzero(other.own) - 2 * np.count_nonzero(own)),
        )


def _linked(piece: Piece, template: Template, differing: Positions) -> bool:
    whole = max((int(n) for n, own in zip(piece.numels, piece.own, strict=True) if not own), default=0)
    return any(
        template.keys[at].role is Role.PARAM and piece.numels[at] == whole for at in differing.tolist()
    )
