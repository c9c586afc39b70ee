"""How far something long has come: the stages tell it, ``report.progress`` shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

Progress = Callable[[str, int, "int | None"], None]
"""Takes a stage (``comparing``), how many things are done, and of how many (None: not known)."""


def silent(stage: str, done: int, total: int | None) -> None:
    """Tell nobody."""


def watched(things: Iterable[T], progress: Progress, stage: str, total: int | None = None) -> Iterator[T]:
    """Yield ``things``, and tell before the first and after each how far it is."""
    progress(stage, 0, total)
    for done, thing in enumerate(things, start=1):
        yield thing
        progress(stage, done, total)
