"""Every comparison as a cell of records in execution order × steps, one byte each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.records import (
    NO_MICROBATCH,
    Comparison,
    Pair,
    Phase,
    RecordKey,
    Role,
    TensorRecord,
    Verdict,
)
from mindspeed_precision.report.measures import level_of

CODES: Mapping[Verdict, int] = {
    Verdict.IDENTICAL: 1,
    Verdict.WITHIN_TOLERANCE: 2,
    Verdict.INCOMPARABLE: 3,
    Verdict.MISSING: 4,
    Verdict.DIVERGED: 5,
}
"""Lowest three bits of a cell, the worst one highest; 0: nothing was recorded. The next four: the level."""

BELOW = 128
"""Bit of a cell whose level is a bound below: of the norm alone."""

MOST_ROWS = 3000
MOST_COLUMNS = 1000
ANY_RANK = -1


@dataclass(frozen=True, kw_only=True)
class Row:
    """A record without its step.

    Attributes:
        rank: of both sides; ``ANY_RANK`` for the worst of all ranks.
        microbatch: as in ``RecordKey``; ``NO_MICROBATCH`` also for the worst of all microbatches.
        phase: when.
        fqn: canonical name.
        role: what.
        slot: which one; empty also where several were put together.
        occurrence: nth call.
        recomputed: seen while activations were recomputed.
    """

    rank: int
    microbatch: int
    phase: Phase
    fqn: str
    role: Role
    slot: str
    occurrence: int
    recomputed: bool


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The cells.

    Attributes:
        rows: in execution order.
        columns: first and last step of each column, ascending.
        cells: ``[rows, columns]`` uint8: a code of ``CODES`` plus eight times the level of the error, plus
            ``BELOW``.
        worst: ``[rows, columns]`` int32: number of the comparison that a cell shows; -1 for none.
        folded: what was put together, or left out, so that it can be shown; in words.
    """

    rows: tuple[Row, ...]
    columns: tuple[tuple[int, int], ...]
    cells: NDArray[np.uint8]
    worst: NDArray[np.int32]
    folded: tuple[str, ...] = ()

    def column_of(self, step: int) -> int:
        """Return the column that shows a step."""
        return next(n for n, (first, last) in enumerate(self.columns) if first <= step <= last)


_Identity = tuple[int, int, Phase, str, Role, str, int, bool]
_Fold = Callable[[_Identity], _Identity]

_FOLDS: tuple[tuple[str, _Fold], ...] = (
    ("", lambda row: row),
    ("each row is the worst of all ranks", lambda row: (ANY_RANK, *row[1:])),
    (
        "each row is the worst of all ranks and microbatches",
        lambda row: (ANY_RANK, NO_MICROBATCH, *row[2:]),
    ),
    (
        "each row is the worst of all ranks, microbatches, calls and slots",
        lambda row: (ANY_RANK, NO_MICROBATCH, *row[2:5], "", 0, False),
    ),
)


def grid_of(comparisons: Sequence[Comparison]) -> Grid:
    """Place every comparison.

    Long runs show several steps in one column, large models several records in one row: a cell is then the
    worst of them, and ``folded`` says so.
    """
    identities, positions, steps, row_numbers = _survey(comparisons)
    known_steps = sorted(set(steps))
    columns = _columns(known_steps)
    words, fold = _fitting(identities)
    places = _ordered(identities, positions, fold)
    left_out = max(len(places) - MOST_ROWS, 0)
    row_of_identity = np.array([places[fold(one)] for one in identities], np.int64)
    rows = row_of_identity[np.array(row_numbers, np.int64)] if row_numbers else np.zeros(0, np.int64)
    column_of_step = {step: n for n, (a, b) in enumerate(columns) for step in known_steps if a <= step <= b}
    found = np.array([column_of_step[step] for step in steps], np.int64)
    codes = np.fromiter((_code(one) for one in comparisons), np.uint8, len(comparisons))
    shape = (len(places), len(columns))
    cells, worst = np.zeros(shape, np.uint8), np.full(shape, -1, np.int32)
    # the last of equal indices stays: the worst one, and of equally bad ones the first
    order = np.lexsort((-np.arange(len(codes)), (codes >> 3) & 15, codes & 7))
    cells[rows[order], found[order]] = codes[order]
    worst[rows[order], found[order]] = order
    keep = _kept(cells, left_out)
    known = list(places)
    said = [words] if words else []
    if any(first != last for first, last in columns):
        said.append(f"each column is the worst of up to {_widest(columns, known_steps)} steps")
    if left_out:
        said.append(f"{left_out} rows of records that agree everywhere are left out")
    return Grid(
        rows=tuple(Row(**dict(zip(Row.__annotations__, known[n], strict=True))) for n in keep),
        columns=tuple(columns),
        cells=cells[keep],
        worst=worst[keep],
        folded=tuple(said),
    )


def _survey(
    comparisons: Sequence[Comparison],
) -> tuple[list[_Identity], list[tuple[int, int, int]], list[int], list[int]]:
    """Return each record without its step, where it comes in a step, and both by comparison."""
    numbers: dict[_Identity, int] = {}
    positions: list[tuple[int, int, int]] = []
    begins: dict[tuple[int, int], int] = {}
    steps: list[int] = []
    rows: list[int] = []
    for comparison in comparisons:
        pair = comparison.pair
        record = pair.baseline if isinstance(pair, Pair) else pair.record
        key, rank = record.key, pair.rank
        begin = begins.setdefault((rank, key.step), record.seq)
        identity = _identity(rank, key)
        number = numbers.setdefault(identity, len(numbers))
        if number == len(positions):
            positions.append((key.phase is not Phase.INIT, record.seq - begin, rank))
        steps.append(key.step)
        rows.append(number)
    return list(numbers), positions, steps, rows


def _identity(rank: int, key: RecordKey) -> _Identity:
    return rank, key.microbatch, key.phase, key.fqn, key.role, key.slot, key.occurrence, key.recomputed


def _code(comparison: Comparison) -> int:
    code = CODES[comparison.verdict]
    if code == CODES[Verdict.IDENTICAL]:
        return code
    level, bound = level_of(comparison)
    return code + 8 * level + (BELOW if bound else 0)


def _columns(steps: Sequence[int]) -> list[tuple[int, int]]:
    each = -(-len(steps) // MOST_COLUMNS) or 1
    return [(steps[n], steps[min(n + each, len(steps)) - 1]) for n in range(0, len(steps), each)]


def _widest(columns: Iterable[tuple[int, int]], steps: Sequence[int]) -> int:
    return max(sum(first <= step <= last for step in steps) for first, last in columns)


def _fitting(identities: Sequence[_Identity]) -> tuple[str, _Fold]:
    """Return the first way of putting records together that leaves few enough, in words and as a function."""
    for words, fold in _FOLDS:
        if len({fold(one) for one in identities}) <= MOST_ROWS:
            return words, fold
    return _FOLDS[-1]


def _ordered(
    identities: Sequence[_Identity], positions: Sequence[tuple[int, int, int]], fold: _Fold
) -> dict[_Identity, int]:
    order = sorted(range(len(identities)), key=positions.__getitem__)
    return {one: n for n, one in enumerate(dict.fromkeys(fold(identities[n]) for n in order))}


def _kept(cells: NDArray[np.uint8], left_out: int) -> NDArray[np.int64]:
    """Return the rows to show, ascending: where there are too many, those that agree are left out last."""
    worst = (cells & 7).max(axis=1, initial=0)
    order = np.argsort(-worst.astype(np.int64), kind="stable")
    return np.sort(order[: len(cells) - left_out])


def record_of(comparison: Comparison) -> TensorRecord:
    """Return the record that names a comparison: the candidate's where there is one."""
    pair = comparison.pair
    return pair.candidate if isinstance(pair, Pair) else pair.record
