"""Recipes: the first origin that can be replayed, and when recipes prove something."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mindspeed_precision.diagnose.facts import Facts
from mindspeed_precision.errors import ReplayError
from mindspeed_precision.records import Finding, Origin, Replay, ReplayRecipe, Side


def first_replayed(
    facts: Facts, finding: Finding, replay: Callable[[Facts, Origin], Replay], *, nothing: str
) -> Replay:
    """Return the replay of the first origin of a finding that can be replayed.

    Args:
        facts: everything that is known.
        finding: whose origins are tried, in order.
        replay: replays one, or raises ReplayError.
        nothing: what is said where the finding concerns no such origin.

    Raises:
        ReplayError: none can be replayed; says why of the first one.
        DumpError: elements that the index promises cannot be read.
    """
    reason: ReplayError | None = None
    for origin in facts.origins:
        if origin.key in finding.explains:
            try:
                return replay(facts, origin)
            except ReplayError as error:
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
