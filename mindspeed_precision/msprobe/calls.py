"""Which microbatch, which call of it, in what order: what ``construct.json`` and the order of entries say.

msprobe counts calls over a step and notes for each call what it ran inside, under Megatron's schedules with
the microbatch. Entries of modules are in the order in which they ended, those of operations as they began.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_precision.msprobe.names import (
    BACKWARD,
    FORWARD,
    PARAMETERS_GRAD,
    EntryName,
    name_or_none,
)
from mindspeed_precision.records import NO_MICROBATCH

OUTSIDE = ("optimizer", "clip_grad")
"""What msprobe notes as the place of operations behind the backward pass."""

_DEEPEST = 200


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When a call was made.

    Attributes:
        microbatch: of the step; ``NO_MICROBATCH`` where that is not known.
        occurrence: nth call of its module, or of the operation in its module, in the microbatch.
        recomputed: it ran again, inside the backward pass.
    """

    microbatch: int
    occurrence: int = 0
    recomputed: bool = False


@dataclass(frozen=True, kw_only=True)
class Construct:
    """``construct.json``: by name of a call, what it ran inside and in which microbatch.

    Attributes:
        parents: name of the call that it ran inside; or of a part of the step (``optimizer``); None: nothing.
        microbatches: as Megatron's schedules count; absent where they did not run.
    """

    parents: Mapping[str, str | None] = field(default_factory=dict)
    microbatches: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Construct:
        """Read the file; what is not as msprobe writes it says nothing."""
        parents: dict[str, str | None] = {}
        microbatches: dict[str, int] = {}
        for name, value in plain.items():
            parent, number = value if isinstance(value, list) and len(value) == 2 else (value, None)
            if isinstance(parent, str | None):
                parents[name] = parent
            if type(number) is int and number >= 0:
                microbatches[name] = number
        stale = [name for name, parent in parents.items() if _stale(name, parent, microbatches)]
        return cls(parents={**parents, **dict.fromkeys(stale)}, microbatches=microbatches)

    def ancestors(self, name: str) -> Iterator[str]:
        """Yield what a call ran inside, from the innermost."""
        seen = {name}
        parent = self.parents.get(name)
        while parent is not None and parent not in seen and len(seen) < _DEEPEST:
            yield parent
            seen.add(parent)
            parent = self.parents.get(parent)

    def outermost(self, name: str) -> str:
        """Return the path of the outermost forward call that a call ran inside, or its own.

        Of a recomputation that is not the model: it runs inside the backward pass.
        """
        around = [name]
        for parent in self.ancestors(name):
            if f".{BACKWARD}." in parent:
                break
            around.append(parent)
        return around[-1].rpartition(f".{FORWARD}.")[0]

    def outside(self, name: str) -> bool:
        """Tell whether it ran behind the backward pass, in clipping or the optimizer."""
        return self.parents.get(name) in OUTSIDE


def moments(
    names: Mapping[str, EntryName], construct: Construct, fqn: Callable[[EntryName], str]
) -> dict[str, Moment]:
    """Return when each call was made.

    A backward call is of the microbatch of its forward one. Where no schedule of Megatron's counted, call N
    of a module is taken for microbatch N.

    Args:
        names: of the entries.
        construct: of the step.
        fqn: gives a module its canonical name.
    """
    found: dict[str, Moment] = {}
    seen: Counter[tuple[object, ...]] = Counter()
    tops: dict[tuple[object, ...], str] = {}
    for name in sorted(names.values(), key=_counted_first):
        if name.direction == BACKWARD and name.forward in found:
            found[name.text] = found[name.forward]
            continue
        around = names.get(construct.parents.get(name.text) or "")
        inside = found.get(around.text) if around is not None and not name.is_module else None
        microbatch = _microbatch(name, construct, inside, names)
        owner = None if name.is_module or around is None else (around.path, around.direction == BACKWARD)
        owner = owner if owner != ("", False) else None  # what runs beside the model is numbered with its own
        place = (owner, fqn(name), name.wrappers, name.direction, microbatch)
        if name.is_module:
            top = construct.outermost(name.text)
            recomputed = name.is_forward and tops.setdefault((place, name.chunk), top) != top
        else:
            recomputed = inside is not None and inside.recomputed and around is not None and around.is_forward
        found[name.text] = Moment(
            microbatch=microbatch, occurrence=seen[place, recomputed], recomputed=recomputed
        )
        seen[place, recomputed] += 1
    return found


def _counted_first(name: EntryName) -> tuple[bool, bool, int, int]:
    return not name.is_forward, not name.is_module, name.call, name.chunk or 0


def _microbatch(
    name: EntryName, construct: Construct, inside: Moment | None, names: Mapping[str, EntryName]
) -> int:
    """Return the microbatch of a call; of several chunks Megatron counts all forward steps together."""
    if name.chunk is not None and name.is_module:
        around = (names.get(parent) for parent in construct.ancestors(name.text))
        model = next((one for one in around if one is not None and one.is_forward and not one.path), None)
        return name.call if model is None else model.call
    if inside is not None:
        return inside.microbatch
    if name.text in construct.microbatches:
        return construct.microbatches[name.text]
    return name.call if name.is_module else NO_MICROBATCH


def _stale(name: str, parent: str | None, microbatches: Mapping[str, int]) -> bool:
    """Tell whether a parent is a backward call that msprobe never took off its stack.

    That happens where a module's inputs want no gradient; the next forward then seems to run inside it.
    """
    if parent is None or f".{BACKWARD}." not in parent or f".{BACKWARD}" in name:
        return False
    own, its = microbatches.get(name), microbatches.get(parent)
    return own is not None and its is not None and own != its


@dataclass(frozen=True, kw_only=True)
class Event:
    """A call that began (its inputs were seen) or ended (its outputs were)."""

    name: str
    ended: bool


def events(entries: Iterable[str], construct: Construct) -> list[Event]:
    """Return beginnings and ends of calls in the order in which they were.

    Entries of modules are in the order of their ends: a module began before the first entry inside it.

    Args:
        entries: names in the order of ``dump.json``.
        construct: of the step.
    """
    order = list(entries)
    known = set(order)
    begun: set[str] = set()
    found: list[Event] = []

    def begin(name: str) -> None:
        if name not in begun:
            begun.add(name)
            found.append(Event(name=name, ended=False))

    for name in order:
        backward = name.replace(f".{PARAMETERS_GRAD}.", f".{BACKWARD}.")  # what a gradient arrives in
        arrived = [backward] if backward != name and backward in known else []
        around = [*arrived, *(parent for parent in construct.ancestors(backward) if parent in known)]
        for parent in reversed(around[: _until_begun(around, begun)]):
            begin(parent)
        begin(name)
        found.append(Event(name=name, ended=True))
    return found


def _until_begun(around: list[str], begun: set[str]) -> int:
    """Return how many of the calls around an entry had not begun; those around one that had, had too."""
    return next((number for number, name in enumerate(around) if name in begun), len(around))


def parsed(entries: Iterable[str]) -> tuple[dict[str, EntryName], list[str]]:
    """Return the names of entries, taken apart, and those that are none of msprobe's."""
    taken = {text: name_or_none(text) for text in entries}
    known = {text: name for text, name in taken.items() if name is not None}
    return known, [text for text in taken if text not in known]
