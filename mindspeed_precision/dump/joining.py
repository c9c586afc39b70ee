"""A run and its restarts, read as one: the steps that the training kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mindspeed_precision.records import INIT_STEP, TensorRecord

if TYPE_CHECKING:
    from mindspeed_precision.dump.reader import RankRecords, Run


@dataclass(frozen=True)
class _Attempt:
    """A run with its name and the steps that are taken from it, ``[first, until)``."""

    name: str
    run: Run
    first: int
    until: float


def join(attempts: Sequence[tuple[str, Run]]) -> Run:
    """Return the first run with the steps of those after it, and notes on what is left out.

    A restart goes on from a checkpoint: what an earlier attempt made from its first step on is left out,
    whether the restart made it again or not, since it led to nothing that the training kept. An attempt that
    made no step, or has another layout or other parameters than the first, is left out, which is said.

    Args:
        attempts: name and run, in their order; the first has none.
    """
    kept, notes = _kept(attempts)
    base = attempts[0][1]
    if not kept:
        return replace(base, notes=(*base.notes, *notes))
    ranks = {number: _joined(number, kept) for number in kept[0].run.ranks}
    manifest = {**kept[0].run.manifest, "findings": _findings([run for _, run in attempts])}
    notes += [note for one in kept for note in _told(one, kept)]
    missing = kept[0].run.missing
    return replace(base, manifest=manifest, ranks=ranks, notes=tuple(notes), missing=missing)


def _kept(attempts: Sequence[tuple[str, Run]]) -> tuple[list[_Attempt], list[str]]:
    """Choose which steps of which attempt are taken; the last word on a step has who made it last."""
    kept: list[_Attempt] = []
    notes: list[str] = []
    for name, run in attempts:
        steps = {step for rank in run.ranks.values() for step in rank.steps if step != INIT_STEP}
        if not steps:
            notes.append(f"{_called(name)} ended before its first step was written, and is left out")
            continue
        if kept and (other := _difference(kept[0].run, run)):
            notes.append(f"{_called(name)} has {other}, and is left out: read {run.path} by itself")
            continue
        stated = run.manifest.get("first_step")
        first = min(steps | ({stated} if type(stated) is int else set()))
        notes += [_dropped(one, first, name) for one in kept if _last(one) >= first]
        gap = max(map(_last, kept), default=first) + 1
        if kept and first > gap:
            between = f"steps {gap} to {first - 1} are in no attempt"
            notes.append(f"{between}: {_called(name)} began with step {first}")
        kept = [replace(one, until=min(one.until, first)) for one in kept if one.first < first]
        kept.append(_Attempt(name, run, first, float("inf")))
    return kept, notes


def _difference(one: Run, two: Run) -> str:
    """Say why two attempts are not of one training; nothing where they are."""
    if one.manifest.get("parallel") != two.manifest.get("parallel") or one.ranks.keys() != two.ranks.keys():
        return "another layout or other ranks"
    for number, rank in one.ranks.items():
        other = two.ranks[number]
        if rank.coordinates != other.coordinates:
            return "another layout"
        if rank.parameters != other.parameters:
            return "other parameters"
        if rank.fingerprint != other.fingerprint:
            return "another definition of fingerprints"
    return ""


def _last(one: _Attempt) -> int:
    steps = [step for rank in one.run.ranks.values() for step in rank.steps if step < one.until]
    return max(steps, default=INIT_STEP)


def _dropped(one: _Attempt, first: int, by: str) -> str:
    last = _last(one)
    steps = f"step {first}" if first == last else f"steps {max(first, one.first)} to {last}"
    return f"left out: {steps} of {_called(one.name)}, since {_called(by)} began with step {first}"


def _called(name: str) -> str:
    return name or "the first attempt"


def _told(one: _Attempt, kept: Sequence[_Attempt]) -> list[str]:
    """Return what must be known of an attempt; of all but the last it is no news that they did not end."""
    after = kept.index(one) + 1
    notes = [f"{one.name}: {note}" if one.name else note for note in one.run.notes]
    if after == len(kept):
        return notes
    ended = f"{_called(one.name)} ended after step {_last(one)}; {kept[after].name} goes on from there"
    return [*(note for note in notes if "did not end as planned" not in note), ended, *_lost(one)]


def _lost(one: _Attempt) -> Iterator[str]:
    """Name the ranks that wrote fewer of the steps that are taken: no restart makes these again."""
    for number, rank in one.run.ranks.items():
        until = max((step for step in rank.steps if step < one.until), default=INIT_STEP)
        if until < _last(one):
            yield f"rank {number}: its steps {until + 1} to {_last(one)} are in no attempt"


def _joined(number: int, kept: Sequence[_Attempt]) -> RankRecords:
    records: list[TensorRecord] = []
    origins: dict[int, tuple[RankRecords, TensorRecord]] = {}
    steps: dict[int, None] = {}
    microbatches: dict[int, int] = {}
    for position, one in enumerate(kept):
        rank = one.run.ranks[number]
        own = {s for s in rank.steps if s < one.until and (s != INIT_STEP or not position)}
        steps.update(dict.fromkeys(step for step in rank.steps if step in own))
        microbatches |= {step: rank.microbatches[step] for step in own}
        for record in rank.records:
            if record.key.step in own:
                moved = replace(record, seq=len(records))
                origins[moved.seq] = (rank, record)
                records.append(moved)
    first, last = kept[0].run.ranks[number], kept[-1].run.ranks[number]
    return replace(
        first,
        records=tuple(records),
        steps=tuple(steps),
        microbatches=microbatches,
        complete=last.complete,
        findings=_distinct([f for one in kept for f in one.run.ranks[number].findings]),
        notes=tuple(note for one in kept for note in one.run.ranks[number].notes),
        unfinished=last.unfinished,
        joined=tuple(one.run.ranks[number].directory for one in kept),
        _origins=origins,
    )


def _findings(runs: Sequence[Run]) -> list[Any]:
    found = [run.manifest.get("findings") for run in runs]
    return list(_distinct([finding for several in found if isinstance(several, list) for finding in several]))


def _distinct(findings: Sequence[Any]) -> tuple[Any, ...]:
    seen: Mapping[str, Any] = {repr(finding): finding for finding in findings}
    return tuple(seen.values())
