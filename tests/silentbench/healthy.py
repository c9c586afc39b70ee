"""Healthy trainings over layouts, types and seeds: of none of them anything may be said."""

from __future__ import annotations

from functools import cache

from silentbench.case import Training


@cache
def grid() -> tuple[tuple[Training, Training], ...]:
    """Return pairs ``(reference, candidate)``."""
    return ()
