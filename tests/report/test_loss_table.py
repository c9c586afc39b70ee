"""The table of loss and grad norm: digits enough to see the difference, and a mark where it begins."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mindspeed_precision.records import StepScalars
from mindspeed_precision.report.loss_table import first_difference, loss_table, same, tolerated


def rows(*values):
    return [
        StepScalars(step=s, baseline_loss=a, candidate_loss=b, baseline_grad_norm=c, candidate_grad_norm=d)
        for s, (a, b, c, d) in enumerate(values)
    ]


def test_equal_values_have_the_digits_of_the_log():
    table = loss_table(rows((8.392705, 8.392705, 0.789, 0.789)))
    assert table[1].split() == ["0", "8.392705", "8.392705", "0.789000", "0.789000"]


@pytest.mark.parametrize("difference", [1e-3, 1e-7, 1e-10, 1e-15])
def test_a_difference_is_visible(difference):
    table = loss_table(rows((1.0, 1.0 + difference, 2.0, 2.0)))
    _, one, two, *_ = table[1].split()
    assert one != two
    assert "loss differs" in table[1]


def test_only_the_first_difference_is_marked():
    table = loss_table(rows((1, 1, 1, 1), (1, 1, 1, 1.001), (1, 1.1, 1, 1.2), (1, 1.1, 1, 1.2)))
    assert ["←" in line for line in table] == [False, False, True, True, False]
    assert table[2].endswith("← grad norm differs")
    assert table[3].endswith("← loss differs")


def test_what_was_not_recorded_is_no_difference():
    data = rows((1.0, None, None, None), (1.0, 2.0, None, None))
    assert first_difference(data, "loss") == 1
    assert first_difference(data, "grad_norm") is None
    assert "grad norm" not in loss_table(data)[0]
    assert loss_table(rows((None, None, None, None))) == []


def test_not_a_number_on_both_sides_agrees():
    assert first_difference(rows((math.nan, math.nan, 1, 1)), "loss") is None
    assert first_difference(rows((math.nan, 1.0, 1, 1)), "loss") == 0


def test_a_long_table_keeps_what_matters():
    data = rows(*[(1.0, 1.0 if step < 50 else 1.5, 1.0, 1.0) for step in range(100)])
    table = loss_table(data)
    assert len(table) < 12
    assert any(line.split()[0] == "50" and "←" in line for line in table)
    assert "…" in table
    assert table[-1].split()[0] == "99"


def test_a_difference_that_the_policy_allows_is_shown_and_not_marked():
    allowed = replace(rows((5.572358, 5.572356, 3.66, 3.67))[0], tolerated=("loss",))
    assert first_difference([allowed], "loss") is None
    assert first_difference([allowed], "grad_norm") == 0
    assert tolerated([allowed], "loss")
    assert not tolerated([allowed], "grad_norm")
    assert not same([allowed])
    line = loss_table([allowed])[1]
    assert line.endswith("← grad norm differs")
    assert "5.572358" in line
    assert "5.572356" in line
