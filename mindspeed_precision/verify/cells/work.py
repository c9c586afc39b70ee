"""What a worker does: load some ranks, and ask the laws that link no others."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_precision.dump.format import rank_directory
from mindspeed_precision.dump.reader import (
    RankRecords,
    Run,
    load_manifest,
    load_rank,
    require_rank,
)
from mindspeed_precision.dump.selected import load_selected
from mindspeed_precision.record.placement import PARAMETER_ROLES
from mindspeed_precision.records import (
    ParameterDeclaration,
    RankCoordinates,
    Role,
    TensorRecord,
)
from mindspeed_precision.verify.invariants import INVARIANTS
from mindspeed_precision.verify.partial import Partial
from mindspeed_precision.verify.registry import Answer, Check
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import Part, Span
from mindspeed_precision.verify.survey import Survey

Name = tuple[int, int]
"""Which law, in the order of their registration, and which of its parts."""

Answers = Mapping[Name, Answer]


@dataclass(frozen=True, kw_only=True)
class CellTask:
    """Ranks to check.

    Attributes:
        path: of the run.
        ranks: ascending.
        expected: how many there are where every rank records.
        coordinates: of all ranks.
        spans: what is checked.
        survey: what is known of the whole run; None: nothing yet, what holds of these ranks is taken for it.
    """

    path: Path
    ranks: tuple[int, ...]
    expected: int
    coordinates: Mapping[int, RankCoordinates]
    spans: frozenset[Span]
    survey: Survey | None = None


@dataclass(frozen=True, kw_only=True)
class CellOutcome:
    """What was found of some ranks.

    Attributes:
        ranks: those that wrote something, without their records.
        absent: the others.
        survey: what the whole run must know of them; None where none wrote anything.
        answers: of the laws that were asked.
        records: what laws of the whole run need of them, with their ranks.
        staged: how many records laws of a stage need of them, by stage.
        laws: those that the worker knows.
    """

    ranks: Mapping[int, RankRecords] = field(default_factory=dict)
    absent: tuple[int, ...] = ()
    survey: Survey | None = None
    answers: Answers = field(default_factory=dict)
    records: Mapping[Name, tuple[tuple[int, TensorRecord], ...]] = field(default_factory=dict)
    staged: Mapping[int, int] = field(default_factory=dict)
    laws: tuple[str, ...] = ()


def parts(*spans: Span) -> Iterator[tuple[Name, Check[RunFacts], Part]]:
    """Yield the parts of the laws that link no more, and no fewer, ranks than some span says."""
    for number, check in enumerate(INVARIANTS):
        for index, part in enumerate(check.span):
            if part.span in spans:
                yield (number, index), check, part


def check_cell(task: CellTask) -> CellOutcome:
    """Load some ranks and ask the laws of them."""
    loaded: dict[int, RankRecords] = {}
    for number in task.ranks:
        found = load_rank(task.path / rank_directory(number))
        if found is not None:
            require_rank(found, number)
            loaded[number] = found
    absent = tuple(number for number in task.ranks if number not in loaded)
    if not loaded:
        return CellOutcome(absent=absent, laws=known_laws())
    run = Run(path=task.path, manifest=load_manifest(task.path), ranks=loaded)
    own = RunFacts(run).surveyed()
    survey = replace(task.survey or own, coordinates=task.coordinates)
    facts = RunFacts(run, survey, task.expected)
    with np.errstate(all="ignore"):  # runs that overflow are what it is for
        answers = asked(facts, parts(*task.spans))
    if task.survey is not None:
        return CellOutcome(answers=answers, laws=known_laws())
    return CellOutcome(
        ranks={
            number: replace(rank, records=(), unfinished=(), _files={}) for number, rank in loaded.items()
        },
        absent=absent,
        survey=replace(own, coordinates={}),
        answers=answers,
        records={
            name: tuple(sorted(_read(part, facts), key=lambda one: (one[0], one[1].seq)))
            for name, _, part in parts(Span.RUN)
            if part.when is None or part.when(facts)
        },
        staged=_staged(facts),
        laws=known_laws(),
    )


def asked(facts: RunFacts, chosen: Iterable[tuple[Name, Check[RunFacts], Part]]) -> dict[Name, Answer]:
    """Ask parts of laws, those that are for this run.

    Raises:
        TypeError: a law finds something in a part of a run, and does not say when that is seen.
    """
    answers: dict[Name, Answer] = {}
    for name, check, part in chosen:
        if part.when is not None and not part.when(facts):
            continue
        answers[name] = check.answer(facts, part.ask)
        for finding in answers[name].findings:
            if part.span is not Span.RUN and not isinstance(finding, Partial):
                told = "a law of single ranks, replicas or stages says when its finding is seen"
                raise TypeError(f"{finding.id}: {told} (findings_of, seen_first)")
    return answers


def known_laws() -> tuple[str, ...]:
    """Return the names of the laws that are registered in this process."""
    return tuple(check.ids[0] for check in INVARIANTS)


def _read(part: Part, facts: RunFacts) -> Iterable[tuple[int, TensorRecord]]:
    """Return what a part reads of some ranks, each record once."""
    assert part.reads is not None
    return {(rank, record.seq): (rank, record) for rank, record in part.reads(facts)}.values()


def _staged(facts: RunFacts) -> Mapping[int, int]:
    found: Counter[int] = Counter()
    for _, _, part in parts(Span.STAGE):
        found.update(facts.ranks[rank].coordinates.pp_rank for rank, _ in _read(part, facts))
    return found


@dataclass(frozen=True, kw_only=True)
class StageTask:
    """Some parameters of a pipeline stage to check.

    Attributes:
        path: of the run.
        ranks: of the stage, ascending.
        survey: of the whole run.
        slice: which of how many parts of the parameters and modules.
    """

    path: Path
    ranks: tuple[int, ...]
    survey: Survey
    slice: tuple[int, int] = (0, 1)


def check_stage(task: StageTask) -> Answers:
    """Read what laws of a stage need, rank by rank, and ask them."""
    chosen = list(parts(Span.STAGE))
    kinds = frozenset(kind for _, _, part in chosen for kind in part.kinds)
    held: dict[Name, dict[int, RankRecords]] = {name: {} for name, _, _ in chosen}
    known: dict[tuple[ParameterDeclaration, ...], tuple[ParameterDeclaration, ...]] = {}
    manifest = load_manifest(task.path)
    for number in task.ranks:
        found = load_selected(task.path / rank_directory(number), kinds)
        if found is None:
            continue
        found = replace(found, parameters=known.setdefault(found.parameters, found.parameters))
        alone = RunFacts(Run(path=task.path, manifest=manifest, ranks={number: found}), task.survey)
        mine = _sliced(found, *task.slice)
        for name, _, part in chosen:
            kept = sorted((one for _, one in _read(part, alone) if mine(one)), key=lambda one: one.seq)
            held[name][number] = replace(found, records=tuple(kept))
    answers: dict[Name, Answer] = {}
    with np.errstate(all="ignore"):
        for one in chosen:
            facts = RunFacts(Run(path=task.path, manifest=manifest, ranks=held.pop(one[0])), task.survey)
            answers.update(asked(facts, [one]) if facts.ranks else {})
    return answers


_OF_PARAMETERS: frozenset[Any] = PARAMETER_ROLES | {Role.HYPERPARAMETER, Role.BUFFER}


def _sliced(rank: RankRecords, index: int, number: int) -> Callable[[TensorRecord], bool]:
    """Return what tells whether a record is of a part of the modules; copies of one parameter go together."""
    names = {
        one.fqn: (one.placement.copy_of if one.placement else "") or one.tied_to or one.fqn
        for one in rank.parameters
    }

    def mine(record: TensorRecord) -> bool:
        fqn = record.key.fqn
        if record.key.role in _OF_PARAMETERS:
            fqn = names.get(fqn, fqn).rpartition(".")[0]
        return zlib.crc32(fqn.encode()) % number == index

    return mine


__all__ = [
    "Answers",
    "CellOutcome",
    "CellTask",
    "Name",
    "StageTask",
    "asked",
    "check_cell",
    "check_stage",
    "parts",
]
