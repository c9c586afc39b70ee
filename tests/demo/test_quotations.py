"""Quoted lines hold on any machine, and another word, name or figure is noticed."""

from __future__ import annotations

import pytest
from quotations import FIGURE, Latitude, unknown_lines

SAID = """\
  first  runs/demo-nan/x  12 records
     2   5.369214E+00   5.369207E+00             1.906              1.907   ← loss and norm
     6   3.487262E+00              -             0.899                nan   ← loss and norm
            bits differ; the norm moves by 1.3e-02 (relative); decoder.layers.0.norm [0]
NOT REPEATED: 2502 of 4 111 records of steps 0 to 3 are equal.
"""


@pytest.mark.parametrize(
    "line",
    [
        "  first  /tmp/a/demo-nan/x  12 records",
        "     2   5.369213E+00   5.369208E+00             1.906              1.906   ← loss",
        "     2   5.369213E+00   5.369213E+00             1.906              1.906",
        "     6   3.487261E+00              -             0.898                nan   ← loss and norm",
        "            bits differ; the norm moves by 1.4e-02 (relative); decoder.layers.0.norm [0]",
        "NOT REPEATED: 2503 of 4 112 records of steps 0 to 3 are equal.",
        "NOT REPEATED: 2502 of 4 111 records of steps …",
    ],
)
def test_another_last_digit_is_the_same_line(line):
    assert unknown_lines([line], SAID) == []


@pytest.mark.parametrize(
    "line",
    [
        "  first  /tmp/a/demo-nan/x  12 steps",
        "  first  /tmp/a/demo-nan/y  12 records",
        "  first  /tmp/a/demo-nan/x  13 records",
        "     3   5.369214E+00   5.369207E+00             1.906              1.907   ← loss and norm",
        "     2   5.569214E+00   5.369207E+00             1.906              1.907   ← loss and norm",
        "     2   5.369214E+01   5.369207E+00             1.906              1.907   ← loss and norm",
        "     2   5.369214E+00   5.369207E+00             1.906                nan   ← loss and norm",
        "     2   5.369214E+00   5.369207E+00             1.906",
        "     6   3.487262E+00   3.487262E+00             0.899                nan   ← loss and norm",
        "            bits differ; the norm moves by 1.3e-03 (relative); decoder.layers.0.norm [0]",
        "            bits differ; the norm moves by 1.3e-02 (relative); decoder.layers.1.norm [0]",
        "            bits differ; the norm moves by 1.3e-02 (relative); decoder.layers.0.norm [1]",
        "NOT REPEATED: 2502 of 4 111 records of steps 1 to 3 are equal.",
        "NOT REPEATED: 2502 of 5 111 records of steps …",
        "NOT REPEATED: 2502 of 4 111 step …",
        "NOT REPEATED: 2502 of 4 111 records of steps 0 to",
        "NOT REPEATED: 2502 of 5 111 records of steps 0 to 3 are equal.",
    ],
)
def test_another_word_name_or_figure_is_noticed(line):
    assert unknown_lines([line], SAID) == [line]


def test_what_chance_decides_may_be_any_count_but_no_other_word():
    chance = Latitude(counts=False)
    assert unknown_lines(["NOT REPEATED: 7 of 9 records of steps 0 to 3 are equal."], SAID, chance) == []
    for other in (
        "NOT REPEATED: 2502 of 4 111 records of ranks 0 to 3 are equal.",
        "     2   5.569214E+00   5.369207E+00             1.906              1.907",
    ):
        assert unknown_lines([other], SAID, chance) == [other]


def test_numbers_of_names_are_no_figures():
    line = "linear_fc2 float32 0.17.1 layers.0 x86 --adam-beta2 0.95, beta2 0.999; 100 % [2]"
    assert FIGURE.findall(line) == ["0.95", "0.999", "100", "2"]
    assert FIGURE.findall("27 parameters, 4 003 records; 1e-06 in 1.") == ["27", "4 003", "1e-06", "1"]
