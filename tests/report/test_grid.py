"""Comparisons as cells: execution order, worst of what is put together, sizes in units of tolerance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mindspeed_precision.records import (
    Comparison,
    Digest,
    Pair,
    Phase,
    RecordKey,
    Role,
    TensorRecord,
    Verdict,
)
from mindspeed_precision.report import grid as grids
from mindspeed_precision.report.grid import BELOW, CODES, grid_of
from mindspeed_precision.report.measures import LEVELS, in_tolerances, level_of, relative_error
from mindspeed_precision.testing.fake_runs import LINEAR

SAME = {"bitwise": True}


def compared(
    fqn="a",
    *,
    step=0,
    seq=0,
    rank=0,
    microbatch=0,
    metrics=SAME,
    verdict=Verdict.IDENTICAL,
    dtype="float32",
    slot="",
):
    key = RecordKey(step=step, microbatch=microbatch, phase=Phase.FPROP, fqn=fqn, role=Role.OUTPUT, slot=slot)
    record = TensorRecord(
        seq=seq, key=key, shape=(2,), dtype=dtype, layout=None, digest=Digest(fingerprint=1, unordered=1)
    )
    pair = Pair(rank=rank, baseline=record, candidate=record)
    return Comparison(pair=pair, verdict=verdict, metrics=metrics)


def apart(error, **how):
    return compared(metrics={"bitwise": False, "rel_frobenius": error}, verdict=Verdict.DIVERGED, **how)


def test_rows_are_in_execution_order_and_columns_are_steps():
    grid = grid_of(
        [
            compared("a", step=0, seq=10),
            compared("b", step=0, seq=11),
            compared("a", step=1, seq=20),
            compared("between", step=1, seq=20),
            compared("b", step=1, seq=21),
        ]
    )
    assert [row.fqn for row in grid.rows] == ["a", "between", "b"]
    assert grid.columns == ((0, 0), (1, 1))
    assert grid.cells.tolist() == [[1, 1], [0, 1], [1, 1]]
    assert grid.worst.tolist() == [[0, 2], [-1, 3], [1, 4]]


def test_ranks_of_one_record_stand_together():
    grid = grid_of([compared(f, seq=n, rank=r) for r in (0, 1) for n, f in enumerate("ab")])
    assert [(row.fqn, row.rank) for row in grid.rows] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


def test_a_cell_is_the_worst_and_of_equally_bad_ones_the_first():
    small, large = apart(1e-6), apart(1e-3)
    grid = grid_of([compared(), small, large, replace(large), apart(1e-5)])
    assert grid.worst.tolist() == [[2]]
    assert grid.cells[0, 0] & 7 == CODES[Verdict.DIVERGED]


def test_many_steps_share_columns_and_many_records_rows(monkeypatch):
    monkeypatch.setattr(grids, "MOST_COLUMNS", 3)
    monkeypatch.setattr(grids, "MOST_ROWS", 4)
    found = [
        compared(f, step=s, seq=n, rank=r, microbatch=m)
        for r in (0, 1)
        for s in range(7)
        for m in (0, 1)
        for n, f in enumerate("ab")
    ]
    found.append(apart(1.0, fqn="b", step=4, seq=1, rank=1, microbatch=1))
    grid = grid_of(found)
    assert grid.columns == ((0, 2), (3, 5), (6, 6))
    assert len(grid.rows) == 4
    assert {row.rank for row in grid.rows} == {grids.ANY_RANK}
    ((row, column),) = np.argwhere(grid.cells & 7 == CODES[Verdict.DIVERGED]).tolist()
    assert (grid.rows[row].fqn, grid.rows[row].microbatch, column) == ("b", 1, 1)
    assert grid.worst[row, column] == len(found) - 1
    assert grid.folded == ("each row is the worst of all ranks", "each column is the worst of up to 3 steps")


def test_rows_that_agree_are_left_out_last_and_said(monkeypatch):
    monkeypatch.setattr(grids, "MOST_ROWS", 3)
    found = [compared(f"m{n}", seq=n) for n in range(9)]
    found[7] = apart(1.0, fqn="m7", seq=7)
    grid = grid_of(found)
    assert [row.fqn for row in grid.rows] == ["m0", "m1", "m7"]
    assert any("6 rows of records that agree everywhere are left out" in said for said in grid.folded)


def test_nothing_compared_is_an_empty_grid():
    grid = grid_of([])
    assert (grid.rows, grid.columns, grid.cells.shape) == ((), (), (0, 0))


@pytest.mark.parametrize(
    ("metrics", "value", "source"),
    [
        ({"rel_frobenius": 1e-3, "norm_change": 1e-9}, 1e-3, "elements"),
        ({"sketch_distance": 2e-3, "norm_change": 1e-9}, 2e-3, "sketch"),
        ({"norm_change": 1e-9}, 1e-9, "norm"),
        ({"norm_change": float("nan")}, None, None),
        ({"norm_change": 0.0}, None, None),
        ({}, None, None),
    ],
)
def test_relative_error_is_the_best_that_is_known(metrics, value, source):
    size = relative_error(compared(metrics={"bitwise": False, **metrics}))
    assert (size and size.value, size and size.source) == (value, source)


def test_units_are_the_tolerance_or_roundings_where_nothing_is_tolerated():
    judged = compared(metrics={"bitwise": False, "rel_frobenius": 1.0, "tolerances": 0.5})
    assert in_tolerances(judged).value == 0.5
    assert in_tolerances(apart(2.0**-8, dtype="bfloat16")).value == 1.0
    assert in_tolerances(apart(2.0**-8, dtype="int64")) is None
    assert in_tolerances(compared()).value == 0.0


def test_levels_rise_and_a_bound_below_is_marked():
    levels = [level_of(apart(units * 2.0**-24))[0] for units in (0.001, *(edge * 1.01 for edge in LEVELS))]
    assert levels == list(range(1, len(LEVELS) + 2))
    assert level_of(apart(float("inf")))[0] == len(LEVELS) + 1
    below = compared(metrics={"bitwise": False, "norm_change": 1e-3}, verdict=Verdict.DIVERGED)
    assert grid_of([below]).cells[0, 0] & BELOW
    assert not grid_of([apart(1e-3)]).cells[0, 0] & BELOW


def test_the_policys_bound_is_the_unit(make_report):
    report = make_report("tolerated")
    used = [c.metrics["tolerances"] for c in report.diagnosis.comparisons if "tolerances" in c.metrics]
    assert used
    for comparison in report.diagnosis.comparisons:
        if "tolerances" in comparison.metrics:
            within = comparison.verdict is Verdict.WITHIN_TOLERANCE
            assert within == (comparison.metrics["tolerances"] <= 1), comparison.reason
    assert any(c.verdict is Verdict.DIVERGED and LINEAR in c.key.fqn for c in report.diagnosis.comparisons)
