"""Loss and grad norm of two runs, side by side, with as many digits as the difference needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mindspeed_precision.counting import agree
from mindspeed_precision.records import StepScalars

USUAL_DECIMALS = 6
"""What Megatron's log prints of a loss."""

_MOST_DECIMALS = 17
_MOST_ROWS = 12


def first_difference(rows: Sequence[StepScalars], quantity: str) -> int | None:
    """Return the first step at which ``loss`` or ``grad_norm`` differs by more than is tolerated; or None."""
    for row in rows:
        if quantity not in row.tolerated and _differ(*_values(row, quantity)):
            return row.step
    return None


def tolerated(rows: Sequence[StepScalars], quantity: str) -> bool:
    """Tell whether ``loss`` or ``grad_norm`` differs anywhere by no more than the policy allows."""
    return any(quantity in row.tolerated and _differ(*_values(row, quantity)) for row in rows)


def same(rows: Sequence[StepScalars]) -> bool:
    """Tell whether every loss and grad norm is the same number in both runs."""
    return not any(_differ(*_values(row, name)) for row in rows for name in ("loss", "grad_norm"))


def recorded(rows: Sequence[StepScalars], quantity: str) -> bool:
    """Tell whether both runs recorded ``loss`` or ``grad_norm`` at any step."""
    return any(None not in _values(row, quantity) for row in rows)


def loss_table(rows: Sequence[StepScalars]) -> list[str]:
    """Return the table, a line per step; the first difference of each quantity is marked.

    Long tables keep their start, what surrounds the first differences, and their end.
    """
    quantities = [name for name in ("loss", "grad_norm") if recorded(rows, name)]
    if not quantities:
        return []
    decimals = {name: _decimals(rows, name) for name in quantities}
    firsts = {name: first_difference(rows, name) for name in quantities}
    titles = ["step"] + [
        f"{name.replace('_', ' ')} {side}" for name in quantities for side in ("baseline", "candidate")
    ]
    table = [titles] + [_cells(row, decimals) for row in rows]
    widths = [max(len(line[column]) for line in table) for column in range(len(titles))]
    lines = [
        "   ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in table
    ]
    marked = [lines[0]]
    for row, line in zip(rows, lines[1:], strict=True):
        names = [name.replace("_", " ") for name, step in firsts.items() if step == row.step]
        verb = agree(len(names), "differ")
        marked.append(f"{line}   ← {' and '.join(names)} {verb}" if names else line)
    return _shorten(marked, rows, {step for step in firsts.values() if step is not None})


def _cells(row: StepScalars, decimals: dict[str, int]) -> list[str]:
    cells = [str(row.step)]
    for name, digits in decimals.items():
        cells += ["-" if value is None else f"{value:.{digits}f}" for value in _values(row, name)]
    return cells


def _decimals(rows: Sequence[StepScalars], quantity: str) -> int:
    """Return how many decimals show every difference, and no fewer than the log prints."""
    pairs = [_values(row, quantity) for row in rows]
    differing = [(a, b) for a, b in pairs if a is not None and b is not None and _differ(a, b)]
    for digits in range(USUAL_DECIMALS, _MOST_DECIMALS):
        if all(f"{a:.{digits}f}" != f"{b:.{digits}f}" for a, b in differing):
            return digits
    return _MOST_DECIMALS


def _shorten(lines: list[str], rows: Sequence[StepScalars], keep: set[int]) -> list[str]:
    if len(rows) <= _MOST_ROWS:
        return lines
    wanted = {0, 1, len(rows) - 1}
    for position, row in enumerate(rows):
        if row.step in keep:
            wanted |= {position - 1, position, position + 1}
    short = [lines[0]]
    previous = -1
    for position in sorted(wanted & set(range(len(rows)))):
        if position != previous + 1:
            short.append("…")
        short.append(lines[position + 1])
        previous = position
    return short


def _values(row: StepScalars, quantity: str) -> tuple[float | None, float | None]:
    if quantity == "loss":
        return row.baseline_loss, row.candidate_loss
    return row.baseline_grad_norm, row.candidate_grad_norm


def _differ(one: float | None, two: float | None) -> bool:
    if one is None or two is None:
        return False
    return one != two and not (math.isnan(one) and math.isnan(two))
