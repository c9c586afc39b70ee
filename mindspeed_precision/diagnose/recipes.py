"""Recipes: the first origin that can be replayed, and when recipes prove something."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from mindspeed_precision.errors import ReplayError
from mindspeed_precision.records import Origin, ReplayRecipe, Side

_Result = TypeVar("_Result")


def first_possible(
    origins: Iterable[Origin], attempt: Callable[[Origin], _Result], *, nothing: str
) -> _Result:
    """Return what ``attempt`` makes of the first origin that it can do something with.

    Args:
        origins: tried in order.
        attempt: raises ReplayError where it cannot.
        nothing: what is said where there is no origin.

    Raises:
        ReplayError: of none; says why of the first one.
        DumpError: elements that the index promises cannot be read.
    """
    reason: ReplayError | None = None
    for origin in origins:
        try:
            return attempt(origin)
        except ReplayError as error:  # noqa: PERF203  (a handful of origins, each reads files)
            reason = reason or error
    raise reason or ReplayError(nothing)


def proves(recipes: Iterable[ReplayRecipe]) -> bool:
    """Tell whether each side's recorded recipe, and not the other's, gives its result bit for bit."""
    told = list(recipes)
    return all(any(side in r.recorded_for and gives_only(r, side) for r in told) for side in Side)


def gives(recipe: ReplayRecipe, side: Side) -> bool:
    """Tell whether a recipe gives what a side has, bit for bit."""
    count = recipe.baseline_mismatched if side is Side.BASELINE else recipe.candidate_mismatched
    return count == 0


def gives_only(recipe: ReplayRecipe, side: Side) -> bool:
    """Tell whether a recipe gives what a side has, bit for bit, and not what the other has."""
    return [other for other in Side if gives(recipe, other)] == [side]
