"""When recipes prove something: each side is what its recorded recipe gives, and the other side is not."""

from __future__ import annotations

from collections.abc import Iterable

from mindspeed_precision.records import ReplayRecipe, Side


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
