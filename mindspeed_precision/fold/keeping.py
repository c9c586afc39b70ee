"""What is kept of a rank: all of it, all but ranges for which other ranks' stand, or some ranges alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from mindspeed_precision.align.ranges import Place, is_divided, places_of, ranged_names
from mindspeed_precision.dump.format import Parameters, parse_line
from mindspeed_precision.dump.reader import RankRecords
from mindspeed_precision.errors import DumpError
from mindspeed_precision.fold.divided import RECORD, Piece
from mindspeed_precision.fold.rank_lines import Positions, RankLines, read_lines
from mindspeed_precision.records import ParameterDeclaration, Phase, TensorRecord

_PHASES = {phase: number for number, phase in enumerate(Phase)}


def with_ranges(rank: RankRecords, names: Collection[str], *, late: bool) -> RankRecords:
    """Return a rank without the ranges for which others' stand.

    Args:
        rank: as it was read.
        names: the parameters whose ranges are kept here.
        late: as ``align.ranges.is_divided`` has it.
    """
    left = ranged_names(rank.records) - set(names)
    if not left:
        return rank
    kept = (r for r in rank.records if r.key.fqn not in left or not is_divided(r.key, late=late))
    places = places_of(rank.records, (parameter.fqn for parameter in rank.parameters), late=late)
    return replace(rank, records=tuple(kept), places=places)


def ranges_alone(directory: Path, like: RankRecords, names: Collection[str], *, late: bool) -> RankRecords:
    """Return the ranges of some parameters of a rank, with the records of these before and after the steps.

    Args:
        directory: of the rank.
        like: the rank, without its records.
        names: the parameters.
        late: as ``align.ranges.is_divided`` has it.

    Raises:
        DumpError: the rank is not what it was when it was read first.
    """
    lines = read_lines(directory, late=late)
    if lines is None or lines.divided is None:
        raise DumpError("changed while it was read", where=str(directory), remedy="compare again")
    declared = _declared(lines, directory)
    numbers = {parameter.fqn: number for number, parameter in enumerate(declared)}
    texts = [line for line in lines.text.split(b"\n") if line.startswith(RECORD)]
    records: list[TensorRecord] = []
    places: dict[int, Place] = {}
    for piece in (piece for piece in lines.divided.pieces if piece.fqn in names):
        of_piece = [parse_line(texts[at], where=str(directory)) for at in piece.at.tolist()]
        parsed = [record for record in of_piece if isinstance(record, TensorRecord)]
        records += parsed
        places |= _places(parsed, piece, lines.divided.shared, numbers.get(piece.fqn, len(numbers)))
    return replace(
        like,
        records=tuple(sorted(records, key=lambda record: record.seq)),
        parameters=declared,
        places=places,
    )


def _declared(lines: RankLines, directory: Path) -> tuple[ParameterDeclaration, ...]:
    told = [parse_line(text, where=str(directory)) for text in lines.declared]
    return tuple(one for line in told if isinstance(line, Parameters) for one in line.parameters)


def _places(records: list[TensorRecord], piece: Piece, shared: Positions, number: int) -> Mapping[int, Place]:
    """Return where the records of a range come, as ``align.ranges.places_of`` has it."""
    before = (np.searchsorted(shared, piece.at) - 1).tolist()
    found: dict[int, Place] = {}
    seen: Counter[int] = Counter()
    for record, at, own in zip(records, before, piece.own.tolist(), strict=True):
        if own:
            found[record.seq] = (at, _PHASES[record.key.phase], number, seen[at])
            seen[at] += 1
    return found
