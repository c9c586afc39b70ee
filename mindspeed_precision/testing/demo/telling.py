"""How a demo tells what happens while it happens."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

from mindspeed_precision.testing.demo.launch import CompletedRun

_Result = TypeVar("_Result")


def say(text: str) -> None:
    """Print a line at once: what follows may take a minute."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def timed(what: str, work: Callable[[], _Result]) -> _Result:
    """Say what is done, do it, say how long it took."""
    sys.stdout.write(f"  {what} … ")
    sys.stdout.flush()
    start = time.monotonic()
    try:
        done = work()
    except BaseException:
        say("failed")
        raise
    say(f"{time.monotonic() - start:.0f} s")
    return done


def log_table(
    baseline: CompletedRun,
    candidate: CompletedRun,
    *,
    names: tuple[str, str] = ("baseline", "candidate"),
    mark: bool = True,
    above: float = 0.0,
    every: int = 1,
) -> str:
    """Return loss and grad norm of two runs as their logs print them; marked where a digit differs.

    Args:
        baseline: one run.
        candidate: the other one.
        names: what the columns call them.
        mark: whether differences are marked.
        above: only those that are larger, relative to the baseline's number.
        every: of many steps every ``every``th is shown.

    A number that the log lacks is a dash: Megatron prints no loss that is NaN.
    """
    columns = [f"{what} {name}" for what in ("loss", "grad norm") for name in names]
    lines = ["   ".join(["  step", *columns])]
    for one, two in list(zip(baseline.rows, candidate.rows, strict=True))[::every]:
        numbers = (one.loss, two.loss, one.grad_norm, two.grad_norm)
        cells = (f"{text or '-':>{len(column)}}" for text, column in zip(numbers, columns, strict=True))
        marks = [
            name
            for name, a, b in (("loss", one.loss, two.loss), ("norm", one.grad_norm, two.grad_norm))
            if a != b and not _near(a, b, above)
        ]
        note = f"   ← {' and '.join(marks)}" if mark and marks else ""
        lines.append("   ".join([f"  {one.iteration - 1:4d}", *cells]) + note)
    return "\n".join(lines)


def _near(one: str, two: str, above: float) -> bool:
    """Tell whether two printed numbers differ by no more than ``above``, relative to the first one."""
    try:
        return abs(float(one) - float(two)) <= above * abs(float(one))
    except ValueError:  # a step that was skipped prints none
        return False
