"""Two runs that memory does not hold, as two that it does: one rank of each class, and for whom it stands."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindspeed_precision.align.ranges import gather_late
from mindspeed_precision.align.stand_ins import StandIns
from mindspeed_precision.compare.policy import Policy
from mindspeed_precision.counting import count
from mindspeed_precision.dump.format import INDEX, Header, parse_line, rank_directory
from mindspeed_precision.dump.inside import require_inside
from mindspeed_precision.dump.later import LaterRecords
from mindspeed_precision.dump.reader import (
    RankRecords,
    Run,
    load_manifest,
    load_rank,
    nothing_written,
    rank_numbers,
    run_of,
)
from mindspeed_precision.engines import Resources, outcomes
from mindspeed_precision.errors import DumpError
from mindspeed_precision.fold.classes import Classes, classes_of, column_of, replica_of
from mindspeed_precision.fold.deciding import of_manifest
from mindspeed_precision.fold.keeping import ranges_alone, with_ranges
from mindspeed_precision.fold.ranges import PieceOutcome
from mindspeed_precision.fold.scan import ColumnOutcome, ColumnTask, RankOutcome, scan_column
from mindspeed_precision.progress import Progress
from mindspeed_precision.records import RankCoordinates

PER_PAIR = 3600
"""Bytes of memory for each pair that is kept: 2.7 KB were measured (docs/scale.md), and workers need some."""


@dataclass(frozen=True, kw_only=True)
class Folded:
    """Two runs, folded.

    Attributes:
        runs: of each side, the ranks that are kept.
        whole: of each side, every rank; the records of those that are not kept are read when asked for.
        stand_ins: for which ranks those that are kept stand.
        shown: of each side, the ranks that are kept, with ranges for which others' stand, and without those
            that are kept for ranges alone.
        left: outcomes of the ranks for which none stands, since memory does not hold them.
        left_ranges: likewise of ranges, by rank.
        total: ranks that both runs have.
    """

    runs: tuple[Run, Run]
    whole: tuple[Run, Run]
    shown: tuple[Run, Run]
    stand_ins: StandIns
    left: tuple[RankOutcome, ...]
    left_ranges: tuple[tuple[int, PieceOutcome], ...]
    total: int

    def describe(self) -> str:
        """Say what was read and what was kept."""
        kept = len(self.shown[0].ranks.keys() & self.shown[1].ranks.keys())
        read = count(self.total, "rank", "were")
        said = f"{read} read and compared, {kept} of them stand for all that did the same"
        ranges = len(self.stand_ins.ranges)
        if not ranges:
            return said
        every = sum(map(len, self.stand_ins.ranges.values())) + len(self.left_ranges)
        return f"{said}, and {ranges} of {every} ranges of the optimizer for all others"


def fold_runs(
    baseline: Path, candidate: Path, *, policy: Policy, resources: Resources, progress: Progress
) -> Folded:
    """Read two runs rank by rank, and keep of each class one rank.

    Args:
        baseline: run directory of this package.
        candidate: likewise.
        policy: what counts as aligned; exact.
        resources: memory, and who reads.
        progress: is told how many ranks were read.

    Raises:
        DumpError: a run cannot be read.
        PrecisionError: workers died again and again.
    """
    paths = baseline, candidate
    manifests = [load_manifest(path) for path in paths]
    tasks = _tasks(paths, manifests, policy)
    columns: list[ColumnOutcome] = []
    total = sum(len(task.ranks) for task in tasks)
    progress("reading", 0, total)
    for column in outcomes(scan_column, tasks, resources):
        columns.append(column)
        progress("reading", sum(len(one.ranks) for one in columns), total)
    ranks = sorted((rank for column in columns for rank in column.ranks), key=lambda one: one.rank)
    _raise_first(ranks)
    classes = classes_of(_by_first_rank(columns), most=resources.memory // PER_PAIR)
    late = any(task.late for task in tasks)
    stand_ins = _stand_ins(classes, ranks, late=late)
    whole = [
        _whole_run(path, manifest, ranks, classes, side)
        for side, (path, manifest) in enumerate(zip(paths, manifests, strict=True))
    ]
    alone = {rank.rank for rank in ranks if None in rank.sides}  # so that they are named
    shown = [
        replace(
            run, ranks={n: rank for n, rank in run.ranks.items() if n in classes.stands_for or n in alone}
        )
        for run in whole
    ]
    kept = [_kept_run(one, run, classes, late=late) for one, run in zip(shown, whole, strict=True)]
    left = set(classes.left)
    return Folded(
        runs=(kept[0], kept[1]),
        whole=(whole[0], whole[1]),
        shown=(shown[0], shown[1]),
        stand_ins=stand_ins,
        left=tuple(rank for rank in ranks if rank.rank in left),
        left_ranges=tuple(
            (rank.rank, piece)
            for rank in ranks
            for piece in rank.ranges
            if (rank.rank, piece.fqn) in classes.left_ranges
        ),
        total=sum(None not in rank.sides for rank in ranks),
    )


def _kept_run(shown: Run, whole: Run, classes: Classes, *, late: bool) -> Run:
    """Return what is aligned of a run: without ranges for which others' stand, and with those that do."""
    names: dict[int, set[str]] = defaultdict(set)
    for rank, name in classes.ranges:
        names[rank].add(name)
    found = {
        n: with_ranges(rank, names[n], late=late) if n in classes.divided else rank
        for n, rank in shown.ranks.items()
    }
    for n in names.keys() - shown.ranks.keys():
        like = whole.ranks[n]
        found[n] = ranges_alone(like.directory, like, names[n], late=late)
    return replace(shown, ranks=dict(sorted(found.items())))


def _by_first_rank(columns: Sequence[ColumnOutcome]) -> list[ColumnOutcome]:
    """Return the columns of which anything is known."""
    known = [
        replace(column, ranks=tuple(rank for rank in column.ranks if any(rank.sides))) for column in columns
    ]
    return sorted((column for column in known if column.ranks), key=lambda column: column.ranks[0].rank)


def _tasks(paths: tuple[Path, Path], manifests: Sequence[dict[str, Any]], policy: Policy) -> list[ColumnTask]:
    """Return a task for each pipeline; a rank whose header cannot be read makes one of its own."""
    numbers = [set(rank_numbers(path, manifest)) for path, manifest in zip(paths, manifests, strict=True)]
    places: dict[object, list[int]] = {}
    for rank in sorted(numbers[0] | numbers[1]):
        path = paths[0] if rank in numbers[0] else paths[1]
        where = _coordinates(path / rank_directory(rank) / INDEX)
        places.setdefault(("rank", rank) if where is None else column_of(where), []).append(rank)
    late = gather_late(*map(of_manifest, paths, manifests))
    return [
        ColumnTask(
            paths=paths,
            ranks=tuple(ranks),
            present=tuple((rank in numbers[0], rank in numbers[1]) for rank in ranks),
            policy=policy,
            late=late,
        )
        for ranks in places.values()
    ]


def _coordinates(index: Path) -> RankCoordinates | None:
    """Return where a rank sits; None where that is for the reader to refuse."""
    try:
        require_inside(index, index.parent.parent)
        with index.open("rb") as file:
            line = parse_line(file.readline(1 << 16), where=str(index))
    except (OSError, DumpError):
        return None
    return line.coordinates if isinstance(line, Header) else None


def _raise_first(ranks: Iterable[RankOutcome]) -> None:
    """Raise what reading one run after the other, rank by rank, would have raised first."""
    listed = list(ranks)
    for side in (0, 1):
        for rank in listed:
            error = rank.errors[side]
            if error is not None:
                raise error


def _stand_ins(classes: Classes, ranks: Sequence[RankOutcome], *, late: bool) -> StandIns:
    replica = {
        rank.rank: replica_of(next(side for side in rank.sides if side is not None).coordinates)
        for rank in ranks
        if any(rank.sides)
    }
    stood_for = {one for some in classes.stands_for.values() for one in some} - classes.stands_for.keys()
    batches: dict[tuple[str, int], tuple[int, int]] = {}
    for rank in (rank for rank in ranks if rank.rank in stood_for):
        for place, (one, two) in rank.batches.items():
            known = batches.get(place, (0, 0))
            batches[place] = known[0] + one, known[1] + two
    return StandIns(
        ranks=classes.stands_for,
        beside={
            rank: tuple(one for one in some if replica[one] == replica[rank])
            for rank, some in classes.stands_for.items()
        },
        batches=batches,
        ranges=classes.ranges,
        late=late,
    )


def _whole_run(
    path: Path, manifest: dict[str, Any], ranks: Sequence[RankOutcome], classes: Classes, side: int
) -> Run:
    """Return a run with all its ranks, of which those that are kept have their records."""
    loaded = {rank: load_rank(path / rank_directory(rank)) for rank in classes.stands_for}
    kept = {rank: records for rank, records in loaded.items() if records is not None}
    by = {one: rank for rank, some in classes.stands_for.items() for one in some}
    found: dict[int, RankRecords] = {}
    notes: list[str] = []
    for rank in ranks:
        outcome = rank.sides[side]
        if outcome is None:
            if rank.present[side]:
                notes.append(nothing_written(rank.rank))
            continue
        notes += [f"rank {rank.rank}: {note}" for note in outcome.notes]
        like = kept.get(by.get(rank.rank, -1))
        directory = path / rank_directory(rank.rank)
        found[rank.rank] = kept.get(rank.rank) or RankRecords(
            directory=directory,
            coordinates=outcome.coordinates,
            records=LaterRecords(directory, outcome.counts),
            steps=outcome.steps,
            parameters=like.parameters if like is not None else (),
            microbatches=dict(outcome.microbatches),
            complete=not outcome.notes,
            findings=outcome.findings,
            notes=outcome.notes,
        )
    if not found:
        raise DumpError("no rank of this run wrote anything", where=str(path), expected=rank_directory(0))
    return run_of(path, manifest, found, notes)
