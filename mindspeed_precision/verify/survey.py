"""What a check of some ranks must know of the whole run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mindspeed_precision.records import Phase, RankCoordinates, Role


@dataclass(frozen=True, kw_only=True)
class Survey:
    """A run, or a part of it, without its records.

    Attributes:
        coordinates: where every rank of the whole run sits that recorded.
        steps: whole steps that every rank has, ascending.
        begun: steps of which there is any record.
        updated: steps in which some optimizer was seen to update.
        half: some parameter is in float16.
        rated: some optimizer was seen to use a learning rate.
        kinds: how many records there are, by phase and role.
    """

    coordinates: Mapping[int, RankCoordinates]
    steps: tuple[int, ...]
    begun: frozenset[int]
    updated: frozenset[int]
    half: bool
    rated: bool
    kinds: Mapping[tuple[Phase, Role], int]

    @property
    def decisive(self) -> tuple[object, ...]:
        """What the checks of some ranks alone ask: a part in which it is another is asked again."""
        stepped = self.kinds.get((Phase.OPTIMIZER, Role.PARAM), 0) > 0
        return self.steps, self.begun, self.updated, self.half, stepped


def joined(surveys: Iterable[Survey], coordinates: Mapping[int, RankCoordinates]) -> Survey:
    """Put the surveys of the parts of a run together."""
    parts = list(surveys)
    kinds: Counter[tuple[Phase, Role]] = Counter()
    for one in parts:
        kinds.update(one.kinds)
    steps = set.intersection(*(set(one.steps) for one in parts)) if parts else set()
    return Survey(
        coordinates=coordinates,
        steps=tuple(sorted(steps)),
        begun=frozenset[int]().union(*(one.begun for one in parts)),
        updated=frozenset[int]().union(*(one.updated for one in parts)),
        half=any(one.half for one in parts),
        rated=any(one.rated for one in parts),
        kinds=kinds,
    )
