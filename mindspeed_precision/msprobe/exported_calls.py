"""The calls of modules that our records are of, under the names that msprobe would give them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mindspeed_precision.dump.reader import RankRecords, Run
from mindspeed_precision.msprobe.names import WRAPPED, parse_name
from mindspeed_precision.msprobe.rank_records import DumpedRank
from mindspeed_precision.records import COLLECTIVES, Phase, Role, TensorRecord

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")

UNKNOWN_CLASS = "Module"
"""Class of a module of which neither the run nor a dump says one."""

_Place = tuple[str, int, int, bool]
"""Module, microbatch, occurrence, recomputed."""


@dataclass(kw_only=True, eq=False)
class Call:
    """One entry of a dump.

    Attributes:
        fqn: canonical name of the module.
        direction: ``forward``, ``backward`` or ``parameters_grad``.
        number: of the call in the step, from 0.
        microbatch: of the step.
        inputs: arguments; of a backward call the gradients of the outputs.
        outputs: results; of a backward call the gradients of the inputs; the gradients of parameters.
        graded_inputs: slots of arguments that got a gradient.
        graded_outputs: slots of results that got one.
        parent: the call that it ran inside; None for the model's.
    """

    fqn: str
    direction: str
    number: int
    microbatch: int
    inputs: list[TensorRecord] = field(default_factory=list)
    outputs: list[TensorRecord] = field(default_factory=list)
    graded_inputs: set[str] = field(default_factory=set)
    graded_outputs: set[str] = field(default_factory=set)
    parent: Call | None = None

    def tensors(self) -> Iterator[TensorRecord]:
        """Yield its tensors."""
        yield from self.inputs
        yield from self.outputs

    def name(self, names: ModuleNames, rank: RankRecords) -> str:
        """Return msprobe's name of it."""
        return f"{names.of_module(self.fqn, rank)}.{self.direction}.{self.number}"


@dataclass(kw_only=True)
class ModuleNames:
    """Names of modules as msprobe has them: wrappers, path, class.

    Attributes:
        kind: ``Module``, or ``Cell`` of MindSpore.
        classes: by canonical name with ``*`` for numbers.
        known: names of a dump, by canonical name.
        unknown: modules of which no class is known.
    """

    kind: str
    classes: Mapping[str, str]
    known: Mapping[str, str]
    unknown: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, run: Run, like: Run | None) -> ModuleNames:
        """Return the names for a run; ``like`` is a dump of the same training."""
        classes: dict[str, str] = {}
        for rank in run.ranks.values():
            for module in rank.effective.get("modules", ()):
                classes.setdefault(str(module["fqn"]), str(module["class"]).rpartition(".")[2])
        known = {} if like is None else _known(like)
        native = run.framework == "mindspore" and _api(run) == "mindspore"
        return cls(kind="Cell" if native else "Module", classes=classes, known=known)

    def of_module(self, fqn: str, rank: RankRecords) -> str:
        """Return kind, wrappers, path and class of a module."""
        if fqn in self.known:
            return self.known[fqn]
        pattern = _NUMBER.sub("*", f".{fqn}")[1:]
        found = self.classes.get(pattern) or self.classes.get(fqn)
        if found is None:
            self.unknown.add(pattern or "(model)")
            found = UNKNOWN_CLASS
        path = [WRAPPED, *fqn.split(".")] if fqn else [WRAPPED]
        return ".".join([self.kind, *path, found])

    def notes(self) -> list[str]:
        """Say which names are made up."""
        if not self.unknown:
            return []
        names = sorted(self.unknown)
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return [
            f"the class of {len(names)} kinds of modules is not known, so they are called {UNKNOWN_CLASS}: "
            f"{shown}; give a dump of msprobe of this training with --like"
        ]


def _api(run: Run) -> object:
    found = run.manifest.get("framework")
    return found.get("api") if isinstance(found, dict) else None


def _known(like: Run) -> dict[str, str]:
    """Return by canonical name the name of a module in a dump, without direction and call."""
    found: dict[str, str] = {}
    for rank in like.ranks.values():
        for fqn, text in rank.modules.items() if isinstance(rank, DumpedRank) else ():
            name = parse_name(text)
            found.setdefault(fqn, text[: -len(f".{name.direction}.{name.call}")])
    return found


def calls_of(rank: RankRecords, step: int) -> list[Call]:
    """Return the entries of one step, in the order in which the calls ended."""
    records = [r for r in rank.records if r.key.step == step]
    forward: dict[_Place, Call] = {}
    numbers: Counter[str] = Counter()
    ends: dict[Call, int] = {}
    for record in records:
        key = record.key
        if key.phase is not Phase.FPROP or key.role not in (Role.INPUT, Role.OUTPUT) or _collective(key.slot):
            continue
        place = (key.fqn, key.microbatch, key.occurrence, key.recomputed)
        if place not in forward:
            forward[place] = Call(
                fqn=key.fqn, direction="forward", number=numbers[key.fqn], microbatch=key.microbatch
            )
            numbers[key.fqn] += 1
        call = forward[place]
        (call.inputs if key.role is Role.INPUT else call.outputs).append(record)
        ends[call] = record.seq
    backward = _backward(records, forward, ends)
    gradients = _gradients(records, ends)
    _nest(forward)
    _nest(backward)
    return sorted([*forward.values(), *backward.values(), *gradients], key=lambda call: ends[call])


def _collective(slot: str) -> bool:
    return slot.partition(".")[0] in COLLECTIVES


def _backward(
    records: list[TensorRecord], forward: Mapping[_Place, Call], ends: dict[Call, int]
) -> dict[_Place, Call]:
    """Return the backward calls; the gradient of a keyword's tensor has no place in msprobe's."""
    found: dict[_Place, Call] = {}
    for record in records:
        key = record.key
        place = (key.fqn, key.microbatch, key.occurrence, False)
        of = forward.get(place)
        if key.phase is not Phase.DGRAD or of is None or _collective(key.slot):
            continue
        graded = of.graded_inputs if key.role is Role.GRAD_INPUT else of.graded_outputs
        graded.add(key.slot)
        if key.role is Role.GRAD_INPUT and not key.slot[:1].isdigit():
            continue
        if place not in found:
            found[place] = Call(
                fqn=key.fqn, direction="backward", number=of.number, microbatch=key.microbatch
            )
        call = found[place]
        (call.outputs if key.role is Role.GRAD_INPUT else call.inputs).append(record)
        ends[call] = record.seq
    for call in found.values():
        for tensors in (call.inputs, call.outputs):
            tensors.sort(key=lambda record: _order(record.key.slot))
    return found


def _order(slot: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isdigit() else (1 << 30, part) for part in slot.split("."))


def _gradients(records: list[TensorRecord], ends: dict[Call, int]) -> list[Call]:
    """Return one entry per module and microbatch: what ``main_grad`` held after its gradients were added."""
    found: dict[tuple[str, int], Call] = {}
    for record in records:
        key = record.key
        if key.phase is Phase.ACCUMULATE and key.role is Role.MAIN_GRAD and key.slot == "after":
            owner = key.fqn.rpartition(".")[0]
            place = (owner, key.microbatch)
            if place not in found:
                found[place] = Call(
                    fqn=owner,
                    direction="parameters_grad",
                    number=max(key.microbatch, 0),
                    microbatch=key.microbatch,
                )
            found[place].outputs.append(record)
            ends[found[place]] = record.seq
    return list(found.values())


def _nest(calls: Mapping[_Place, Call]) -> None:
    """Find for each call the innermost one around it: of a module above it, in the same microbatch."""
    first: dict[tuple[str, int, bool], Call] = {}
    by_module: dict[str, list[Call]] = defaultdict(list)
    for (fqn, microbatch, _, recomputed), call in calls.items():
        first.setdefault((fqn, microbatch, recomputed), call)
        by_module[fqn].append(call)
    for (fqn, microbatch, _, recomputed), call in calls.items():
        path = fqn
        while path:
            path = path.rpartition(".")[0]
            around = first.get((path, microbatch, recomputed)) or first.get((path, microbatch, False))
            if around is not None and around is not call:
                call.parent = around
                break
