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


def log_table(baseline: CompletedRun, candidate: CompletedRun, *, mark: bool = True) -> str:
    """Return loss and grad norm of two runs as their logs print them; marked where a digit differs."""
    lines = ["  step   loss baseline   loss candidate   grad norm baseline   grad norm candidate"]
    for one, two in zip(baseline.rows, candidate.rows, strict=True):
        marks = [
            name
            for name, a, b in (("loss", one.loss, two.loss), ("norm", one.grad_norm, two.grad_norm))
            if a != b
        ]
        note = f"   ← {' and '.join(marks)}" if mark and marks else ""
        lines.append(
            f"  {one.iteration - 1:4d}   {one.loss:>13}   {two.loss:>14}   {one.grad_norm:>18}   "
            f"{two.grad_norm:>19}{note}"
        )
    return "\n".join(lines)
