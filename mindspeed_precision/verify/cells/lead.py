"""A run checked in parts, one after the other or by several workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from mindspeed_precision.counting import count
from mindspeed_precision.dump.format import rank_directory
from mindspeed_precision.dump.reader import (
    Run,
    load_manifest,
    rank_numbers,
)
from mindspeed_precision.engines import Resources, outcomes
from mindspeed_precision.errors import DumpError
from mindspeed_precision.progress import Progress
from mindspeed_precision.records import CheckOutcome, Finding, TensorRecord
from mindspeed_precision.verify.cells.gathering import Gathered
from mindspeed_precision.verify.cells.joining import joined_answer
from mindspeed_precision.verify.cells.plan import PER_RECORD, Plan, mebibytes, plan, slices, stages, workers
from mindspeed_precision.verify.cells.work import (
    CellTask,
    Name,
    StageTask,
    asked,
    check_cell,
    check_stage,
    parts,
)
from mindspeed_precision.verify.invariants import INVARIANTS
from mindspeed_precision.verify.partial import plain
from mindspeed_precision.verify.registry import Answer, worst_first
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import Part, Span
from mindspeed_precision.verify.survey import Survey
from mindspeed_precision.verify.survey import joined as joined_surveys

Task = TypeVar("Task")
Outcome = TypeVar("Outcome")

_LEAST = 16 << 20
"""Bytes that are always there for records that laws of the whole run need: a process takes more by itself."""

_PER_LETTER = 6
"""Bytes of memory for each letter of ``effective.json``, where it is read."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What the laws say of a run.

    Attributes:
        run: the run, without its records.
        findings: worst first.
        outcomes: what each law looked at.
        told: how it was checked.
    """

    run: Run
    findings: tuple[Finding, ...]
    outcomes: tuple[CheckOutcome, ...]
    told: str


def check_in_cells(path: Path, resources: Resources, progress: Progress) -> Checked:
    """Ask every law of a run that memory does not hold.

    Args:
        path: run directory of this package, not restarted.
        resources: memory, and who works.
        progress: is told how many parts were checked.

    Raises:
        DumpError: the run cannot be read.
        PrecisionError: workers died again and again.
    """
    manifest = load_manifest(path)
    numbers = rank_numbers(path, manifest)
    if not numbers:
        raise DumpError("no rank of this run wrote anything", where=str(path), expected=rank_directory(0))
    planned = plan(path, numbers, resources)
    gathered = _gathered(path, planned, resources, progress)
    run = gathered.run(path, manifest)
    survey = joined_surveys(gathered.surveys.values(), planned.coordinates)
    _again(path, planned, gathered, survey, resources, progress)
    told = _staged(path, run, gathered, survey, resources, progress)
    gathered.add(_of_the_run(run, gathered, survey))
    return _answer(run, planned, gathered, f"{_told(planned)}, {told}", resources)


def _gathered(path: Path, planned: Plan, resources: Resources, progress: Progress) -> Gathered:
    gathered = Gathered(max(resources.memory // 2, _LEAST))
    tasks = [
        CellTask(
            path=path,
            ranks=cell.ranks,
            expected=cell.expected,
            coordinates=planned.coordinates,
            spans=planned.spans,
        )
        for cell in planned.cells
    ]
    need = max(cell.need for cell in planned.cells)
    for outcome in _watched(check_cell, tasks, resources, need, progress, "checking ranks"):
        gathered.take(outcome)
    return gathered


def _watched(
    function: Callable[[Task], Outcome],
    tasks: Sequence[Task],
    resources: Resources,
    need: int,
    progress: Progress,
    stage: str,
) -> Iterator[Outcome]:
    """Yield what a function gives of each task, with as many workers as find room."""
    progress(stage, 0, len(tasks))
    limited = replace(resources, jobs=workers(resources, need, len(tasks)))
    for done, outcome in enumerate(outcomes(function, tasks, limited), start=1):
        yield outcome
        progress(stage, done, len(tasks))


def _again(
    path: Path,
    planned: Plan,
    gathered: Gathered,
    survey: Survey,
    resources: Resources,
    progress: Progress,
) -> None:
    """Ask the cells again of which another thing holds than of the whole run; then take all answers."""
    other = [index for index, own in gathered.surveys.items() if own.decisive != survey.decisive]
    tasks = [
        CellTask(
            path=path,
            ranks=planned.cells[index].ranks,
            expected=planned.cells[index].expected,
            coordinates=planned.coordinates,
            spans=planned.spans,
            survey=survey,
        )
        for index in other
    ]
    if tasks:
        need = max(planned.cells[index].need for index in other)
        found = _watched(check_cell, tasks, resources, need, progress, "checking again")
        for index, outcome in zip(other, found, strict=True):
            gathered.of_cells[index] = outcome.answers
    for answers in gathered.of_cells:
        gathered.add(answers)


def _staged(
    path: Path, run: Run, gathered: Gathered, survey: Survey, resources: Resources, progress: Progress
) -> str:
    """Ask the laws of stages; say in how many parts."""
    at = {number: rank.coordinates for number, rank in run.ranks.items()}
    groups = stages(at, {number: rank.parameters for number, rank in run.ranks.items()})
    tasks, need = [], 0
    for group in groups:
        ranks = tuple(number for number, where in at.items() if where.pp_rank in group)
        records = sum(gathered.staged[stage] for stage in group)
        number = slices(records, resources)
        need = max(need, records * PER_RECORD // number)
        tasks += [
            StageTask(path=path, ranks=ranks, survey=survey, slice=(index, number)) for index in range(number)
        ]
    for answers in _watched(check_stage, tasks, resources, need, progress, "checking stages"):
        gathered.add(answers)
    return f"{count(len(groups), 'pipeline stage')} in {count(len(tasks), 'part')}"


def _of_the_run(run: Run, gathered: Gathered, survey: Survey) -> dict[Name, Answer]:
    """Ask the laws of the whole run, each of the records that it needs."""
    answers: dict[Name, Answer] = {}
    light = RunFacts(run, survey)
    letters = sum(map(len, gathered.effective))
    for name, check, part in parts(Span.RUN):
        if part.when is not None and not part.when(light):
            continue
        need = gathered.needs[name] + (letters * _PER_LETTER if part.effective else 0)
        if name not in gathered.records or (part.effective and need > gathered.budget):
            answers[name] = _left_out("what it needs of all ranks takes", 2 * need)
            continue
        facts = RunFacts(_with_records(run, gathered.records.pop(name)), survey)
        with np.errstate(all="ignore"):
            answers.update(asked(facts, [(name, check, part)]))
    return answers


def _left_out(what: str, need: int) -> Answer:
    return Answer(exercised=0, skipped=f"{what} more memory than --memory allows: --memory {mebibytes(need)}")


def _with_records(run: Run, found: Iterable[tuple[int, TensorRecord]]) -> Run:
    by_rank: dict[int, list[TensorRecord]] = defaultdict(list)
    for rank, record in found:
        by_rank[rank].append(record)
    ranks = {
        number: replace(rank, records=tuple(by_rank[number])) if number in by_rank else rank
        for number, rank in run.ranks.items()
    }
    return replace(run, ranks=ranks)


def _answer(run: Run, planned: Plan, gathered: Gathered, told: str, resources: Resources) -> Checked:
    findings: list[Finding] = []
    found: list[CheckOutcome] = []
    for number, check in enumerate(INVARIANTS):
        answers = [
            one for index in range(len(check.span)) for one in gathered.answers.get((number, index), ())
        ]
        if Span.REPLICA not in planned.spans and any(_links_replicas(part, run) for part in check.span):
            answers.append(_left_out("a data-parallel replica takes", planned.replica))
        answer = joined_answer(check, answers)
        findings += map(plain, answer.findings)
        found.append(check.outcome(answer))
    size = f"checking the whole run takes about {mebibytes(planned.whole)} of memory"
    return Checked(
        run=run,
        findings=tuple(worst_first(findings)),
        outcomes=tuple(found),
        told=f"checked in parts ({told}): {size}, --memory is {mebibytes(resources.memory)}",
    )


def _links_replicas(part: Part, run: Run) -> bool:
    return part.span is Span.REPLICA and (part.when is None or part.when(RunFacts(run)))


def _told(planned: Plan) -> str:
    sizes = {len(cell.ranks) for cell in planned.cells}
    what = "data-parallel replica" if Span.REPLICA in planned.spans else "rank"
    each = f" of {count(max(sizes), 'rank')}" if Span.REPLICA in planned.spans else ""
    return f"{count(len(planned.cells), what)}{each}"


__all__ = ["Checked", "check_in_cells"]
