"""Findings of parts of a run: what puts those of several parts together to what the whole run shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from mindspeed_precision.records import Finding, RecordKey

SHOWN = 3
"""Places of which a finding says what is there."""

NAMED = 6
"""Places, steps and ranks that it names."""

Order = tuple[Any, ...]
"""When something is seen; comparable within one check."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One place where something does not hold.

    Attributes:
        where: the record.
        rank: whose it is.
        seq: its place in the execution of the rank.
        kind: what went wrong, in the same words wherever the same thing did; empty: not known.
        found: what is there, with numbers.
    """

    where: RecordKey
    rank: int
    seq: int
    found: str
    kind: str = ""

    @property
    def order(self) -> Order:
        """When it is seen."""
        return self.where.step, self.seq, self.rank


@dataclass(frozen=True, kw_only=True)
class Places:
    """Places of one kind of fault, as many as there are, in as much memory as a finding needs.

    Attributes:
        first: the earliest.
        count: how many there are.
        steps: of all.
        ranks: of all.
        names: of all, each with when it is seen first.
        notes: further evidence.
    """

    first: tuple[Failure, ...]
    count: int
    steps: frozenset[int]
    ranks: frozenset[int]
    names: Mapping[str, Order]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, found: Sequence[Failure], notes: tuple[str, ...]) -> Places:
        """Return the places of failures that are in order."""
        names: dict[str, Order] = {}
        for one in found:
            names.setdefault(one.where.fqn, one.order)
        return cls(
            first=tuple(found[:SHOWN]),
            count=len(found),
            steps=frozenset(one.where.step for one in found),
            ranks=frozenset(one.rank for one in found),
            names=names,
            notes=notes,
        )

    def joined(self, other: Places) -> Places:
        """Return the places of both."""
        names = dict(self.names)
        for name, order in other.names.items():
            names[name] = min(names.get(name, order), order)
        return Places(
            first=tuple(sorted((*self.first, *other.first), key=lambda one: one.order)[:SHOWN]),
            count=self.count + other.count,
            steps=self.steps | other.steps,
            ranks=self.ranks | other.ranks,
            names=names,
            notes=tuple(dict.fromkeys((*self.notes, *other.notes))),
        )

    def evidence(self) -> tuple[str, ...]:
        """Return what a finding tells of them."""
        lines = [f"rank {one.rank}, {one.where.describe()}: {one.found}" for one in self.first]
        names = sorted(self.names, key=lambda name: self.names[name])
        if self.count > 1:
            more = f", … {len(names) - NAMED} more" if len(names) > NAMED else ""
            lines.append(
                f"{self.count} places: steps {_numbers(self.steps)}, ranks {_numbers(self.ranks)}, "
                f"{', '.join(names[:NAMED])}{more}"
            )
        return (*lines, *self.notes)


def _numbers(found: Iterable[int]) -> str:
    values = sorted(found)
    shown = ", ".join(map(str, values[:NAMED]))
    return f"{shown}, … {values[-1]}" if len(values) > NAMED else shown


@dataclass(frozen=True, kw_only=True)
class Partial(Finding):
    """A finding as some ranks show it.

    Attributes:
        order: when it is seen first.
        kind: findings of one id and kind are one.
        count: of how many of the things that its check counts it is.
        places: all of them, where the finding tells of each.
    """

    order: Order
    kind: str = ""
    count: int = 1
    places: Places | None = field(default=None, compare=False, repr=False)


def plain(finding: Finding) -> Finding:
    """Return a finding without what only parts of a run need."""
    if not isinstance(finding, Partial):
        return finding
    return Finding(**{one.name: getattr(finding, one.name) for one in fields(Finding)})


def joined(parts: Iterable[Partial]) -> list[Partial]:
    """Put findings of several parts of a run together, of one check: one for each id and kind."""
    groups: dict[tuple[str, str], list[Partial]] = {}
    for one in parts:
        groups.setdefault((one.id, one.kind), []).append(one)
    return sorted(map(_one_of, groups.values()), key=lambda one: one.order)


def _one_of(group: Sequence[Partial]) -> Partial:
    first = min(group, key=lambda one: one.order)
    if len(group) == 1:
        return first
    count = sum(one.count for one in group)
    if first.places is None:
        told = f"{len(group)} parts of the run show it, in {count} places in all; numbers are of one part"
        return replace(first, count=count, evidence=(*first.evidence, told))
    places = group[0].places
    for one in group[1:]:
        places = one.places if places is None or one.places is None else places.joined(one.places)
    assert places is not None
    return replace(first, count=count, evidence=places.evidence(), places=places)
