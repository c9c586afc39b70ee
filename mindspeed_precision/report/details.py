"""What a page knows of single pairs: both sides' statistics, bits, layout, and how far apart they are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice, repeat
from typing import Any

import numpy as np

from mindspeed_precision.records import Comparison, Diagnosis, Pair, Side, Statistics, TensorRecord, Verdict
from mindspeed_precision.report.grid import CODES, Grid
from mindspeed_precision.report.packing import packed_ready
from mindspeed_precision.report.visible import visible_text

CHUNK = 256
"""Pairs that are packed together; what does not fit into the page is left out by chunks."""


def packed_details(diagnosis: Diagnosis, grid: Grid, *, room: int) -> tuple[list[str], int]:
    """Pack the details of the cells of a grid, the most telling first, until ``room`` bytes are used.

    Returns:
        The chunks, and of how many cells they are.
    """
    chunks: list[str] = []
    places = _by_interest(diagnosis, grid)
    taken = 0
    while some := list(islice(places, CHUNK)):
        text = packed_ready([detail(diagnosis.comparisons[number], row, col) for row, col, number in some])
        if len(text) > room:
            break
        room -= len(text)
        chunks.append(text)
        taken += len(some)
    return chunks, taken


def _by_interest(diagnosis: Diagnosis, grid: Grid) -> Iterator[tuple[int, int, int]]:
    """Yield row, column and number: origins, where rows first differ, where they differ most, the rest."""
    origins = {id(origin.comparison) for origin in diagnosis.origins}
    priority = np.full(grid.cells.shape, 4, np.int64)
    verdicts = grid.cells & 7
    if grid.cells.size:
        rows = np.arange(len(grid.rows))
        priority[verdicts == CODES[Verdict.DIVERGED]] = 3
        priority[rows, np.argmax(verdicts.astype(np.int64) * 16 + ((grid.cells >> 3) & 15), axis=1)] = 2
        bad = verdicts > CODES[Verdict.WITHIN_TOLERANCE]
        priority[rows, np.argmax(bad, axis=1)] = 1
    for row, col in np.argwhere(grid.worst >= 0) if origins else ():
        if id(diagnosis.comparisons[grid.worst[row, col]]) in origins:
            priority[row, col] = 0
    order = np.argsort(priority.ravel(), kind="stable")
    columns = grid.cells.shape[1]
    for place in order:
        row, col = divmod(int(place), columns)
        if grid.worst[row, col] >= 0:
            yield row, col, int(grid.worst[row, col])


def detail(comparison: Comparison, row: int, col: int) -> list[Any]:
    """Return one pair as a list: row, column, step, reason, metrics, both sides (null: it has no record).

    Every number is one that JSON has, NaN and infinities are texts, and every text is visible.
    """
    pair = comparison.pair
    if isinstance(pair, Pair):
        sides = [side_of(pair.baseline, pair, Side.BASELINE), 0]  # 0: the same in every respect
        if not _same(pair):
            sides[1] = side_of(pair.candidate, pair, Side.CANDIDATE)
    else:
        mine = side_of(pair.record, None, pair.side)
        sides = [mine, None] if pair.side is Side.BASELINE else [None, mine]
    metrics = {name: _short(value) for name, value in comparison.metrics.items() if name != "bitwise"}
    return [row, col, comparison.key.step, _said(comparison.reason), metrics, *sides]


def _same(pair: Pair) -> bool:
    one, other = (
        (record.shape, record.dtype, record.layout, record.digest, record.note, record.payload is None)
        for record in (pair.baseline, pair.candidate)
    )
    held_by = [list(pair.held_by.get(side, ())) for side in Side]
    return one == other and held_by[0] == held_by[1]


def side_of(record: TensorRecord, pair: Pair | None, side: Side) -> Any:
    """Return a record as a list: shape, dtype, layout, bits, statistics, histogram, what is said of it."""
    layout, digest = record.layout, record.digest
    return [
        list(record.shape),
        _said(record.dtype),
        None
        if layout is None
        else [list(layout.stride), int(layout.contiguous), layout.storage_offset, _said(layout.format)],
        f"{digest.fingerprint:016x}" if digest.exact else "",
        _statistics(digest.statistics, exact=record.numel == 1),
        _histogram(digest.statistics),
        int(record.payload is not None),
        _said(record.note),
        list(pair.held_by.get(side, ())) if pair is not None else [],
    ]


def _statistics(statistics: Statistics | None, *, exact: bool) -> list[Any] | None:
    """Return minimum, maximum, mean, norm, zeros (None: not counted), NaN, Inf; a single number in full."""
    if statistics is None:
        return None
    moments = (statistics.minimum, statistics.maximum, statistics.mean, statistics.l2_norm)
    kept = [_number(value) if exact else _short(value) for value in moments]
    return [*kept, statistics.zeros if statistics.counted else None, statistics.nans, statistics.infs]


def _histogram(statistics: Statistics | None) -> list[int] | None:
    """Return the first bin that is not empty, and the counts from there to the last one."""
    if statistics is None or not statistics.exponents:
        return None
    bins = statistics.exponents
    first, last = min(bins), max(bins)
    return [first, *map(bins.get, range(first, last + 1), repeat(0))]


def _short(value: float | int | bool) -> float | int | bool | str:
    """Return a number with as many digits as a reader can use."""
    return _number(float(f"{value:.7g}")) if isinstance(value, float) else value


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


_said = lru_cache(maxsize=4096)(visible_text)
