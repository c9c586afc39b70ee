"""A bar on stderr while something long runs: only on a terminal, only where rich is installed."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from mindspeed_precision.progress import Progress, silent

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

_EVERY = 0.1
"""Seconds between two looks at the terminal: a stage may tell of a hundred thousand things."""


@contextmanager
def progress_bar(*, wanted: bool = True, stream: TextIO | None = None) -> Iterator[Progress]:
    """Show what a stage tells for as long as the context lasts; afterwards the terminal is as before.

    Args:
        wanted: False where a machine reads the output (``--json``).
        stream: stderr by default; what is no terminal gets nothing.
    """
    out = stream or sys.stderr
    if not (wanted and out.isatty() and importlib.util.find_spec("rich") is not None):
        yield silent
        return
    with _bars(out) as bars:
        yield _Shown(bars)


def _bars(out: TextIO) -> Bars:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    return Bars(
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(file=out),
        transient=True,
        auto_refresh=False,  # no thread beside a training
        redirect_stdout=False,
        redirect_stderr=False,
    )


class _Shown:
    """One bar, of the stage that told last."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._stage = ""
        self._task: TaskID | None = None
        self._last = 0.0

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        if stage != self._stage or self._task is None:
            if self._task is not None:
                self._bars.remove_task(self._task)
            self._stage, self._task = stage, self._bars.add_task(stage, total=total)
            self._last = 0.0
        now = time.monotonic()
        if now - self._last < _EVERY and done != total:
            return
        self._last = now
        self._bars.update(self._task, completed=done, total=total)
        self._bars.refresh()


class StepBar:
    """A bar for a training that prints by itself: shown after each step, gone before anything else is.

    A line that the training prints to the same terminal would land inside a bar that stays; so this one is
    written in one go at the end of a step, and the cursor put back, so that the next line takes its place.

    Args:
        total: steps that are to be recorded; None: not known.
        stream: stderr by default; what is no terminal gets nothing.
    """

    def __init__(self, total: int | None, *, stream: TextIO | None = None) -> None:
        self._out = stream or sys.stderr
        self._total = total
        self._shows = self._out.isatty() and importlib.util.find_spec("rich") is not None
        self._began = time.monotonic()

    def step(self, done: int) -> None:
        """Say that ``done`` steps were recorded."""
        if not self._shows:
            return
        from rich.console import Console
        from rich.progress_bar import ProgressBar

        of = "" if self._total is None else f"/{self._total}"
        console = Console(file=self._out, width=30)
        with console.capture() as drawn:
            console.print(ProgressBar(total=self._total, completed=done, width=30), end="")
        took = time.monotonic() - self._began
        self._out.write(f"\r\x1b[2Krecording {drawn.get()} {done}{of} steps, {took:.0f} s\r")
        self._out.flush()

    def close(self) -> None:
        """Take the bar away."""
        if self._shows:
            self._out.write("\r\x1b[2K")
            self._out.flush()


__all__ = ["StepBar", "progress_bar"]
