"""The elements of one update of the optimizer, as far as they were kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mindspeed_precision.records import Role
from mindspeed_precision.verify.elements import Vector, numbers
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.updates import Update, updates

MOMENTS = {Role.EXP_AVG: "exp_avg", Role.EXP_AVG_SQ: "exp_avg_sq"}
PLAIN = ("float32", "float64", "bfloat16")
"""Types in which a moment is kept as it is; of narrower ones a scale goes with it, which is not recorded."""

NEEDS = (
    "needs elements of the clipped gradient, exp_avg, exp_avg_sq and the parameter, after this step and "
    "the one before (preset check)"
)


def decay_is_coupled(facts: RunFacts) -> bool | None:
    """Return whether the configuration adds weight decay to the gradient; None: it does not say."""
    config = facts.config.get("optimizer_config", {})
    wanted = config.get("decoupled_weight_decay")
    return None if wanted is None else not wanted


@dataclass(frozen=True, kw_only=True)
class Elements:
    """What an update read, ``[n]`` each; None where it was not kept, and is not known to be zero.

    Attributes:
        gradient: as it was applied, after clipping.
        parameter: before the update; the master parameter where there is one.
        first: exp_avg before it.
        second: exp_avg_sq before it.
    """

    gradient: Vector
    parameter: Vector | None
    first: Vector | None
    second: Vector | None


def elements_of(facts: RunFacts, update: Update) -> Elements | None:
    """Return the elements that an update read, flat; None where those of the gradient were not kept."""
    gradient = numbers(facts, update.rank, update.gradient)
    if gradient is None:
        return None
    flat = gradient.reshape(-1)

    def moment(role: Role) -> Vector | None:
        if role in update.before:
            found = numbers(facts, update.rank, update.before[role])
            return None if found is None else found.reshape(-1)
        return np.zeros_like(flat) if update.fresh else None

    return Elements(
        gradient=flat,
        parameter=before_of(facts, update),
        first=moment(Role.EXP_AVG),
        second=moment(Role.EXP_AVG_SQ),
    )


def before_of(facts: RunFacts, update: Update) -> Vector | None:
    """Return the elements of what was updated as they were before, ``[n]``; of a range its own."""
    original, updated = update.original, update.updated
    values = numbers(facts, update.rank, original)
    if original is None or updated is None or values is None:
        return None
    flat = values.reshape(-1)
    if updated.part is not None and original.part != updated.part and updated.numel < flat.size:
        first = original.part[0] if original.part else 0
        flat = flat[updated.part[0] - first : updated.part[1] - first]
    return flat if flat.size == updated.numel else None


def every_update(facts: RunFacts) -> Iterator[Update]:
    """Yield the updates of all ranks."""
    for rank in facts.ranks:
        yield from updates(facts, rank)
