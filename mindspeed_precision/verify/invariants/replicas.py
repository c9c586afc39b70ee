"""What several ranks hold alike: parameters, reduced gradients, optimizer states, whole activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from mindspeed_precision.align.merging import BEFORE_REDUCTION
from mindspeed_precision.align.replicas import Replicas, kept_equal_by, replicas_of
from mindspeed_precision.counting import count
from mindspeed_precision.dump.reader import RankRecords, Run
from mindspeed_precision.record.placement import PARAMETER_ROLES, parameter_of
from mindspeed_precision.records import (
    NO_MICROBATCH,
    Phase,
    RecordKey,
    ReplicasDiffer,
    Role,
    Severity,
    TensorRecord,
)
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.partial import Partial
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import each_replica, each_stage, whole_run

_Names = frozenset[str]

_SHARED = tuple(
    (phase, role)
    for phase in Phase
    for role in (*PARAMETER_ROLES, Role.HYPERPARAMETER)
    if phase not in BEFORE_REDUCTION
)
"""Kinds of records of parameters that all replicas have alike."""


def _alone(facts: RunFacts) -> Answer | None:
    """Return what is said of a run of one rank, or of which one alone was recorded."""
    if len(facts.coordinates) > 1:
        return None
    alone = next(iter(facts.ranks.values())).coordinates.world_size == 1
    return Answer(exercised=0, applies=not alone, skipped="" if alone else "one rank alone was recorded")


def _answer(found: Replicas, reduced: Sequence[ReplicasDiffer] = (), *, late: bool = False) -> Answer:
    skipped = "" if found.compared else "no tensor is known to have a copy on another rank"
    if late:
        skipped = "not parameters after a step: the next forward pass gathers them (overlap_param_gather)"
    findings = (_finding(found, reduced),) if found.differing else ()
    return Answer(exercised=found.compared, failed=len(found.differing), findings=findings, skipped=skipped)


def _late(facts: RunFacts) -> bool:
    return bool(facts.config.get("ddp_config", {}).get("overlap_param_gather")) and _has_late(facts.run)


def _in_replica(facts: RunFacts) -> Answer:
    """Compare what the ranks of a replica hold alike, and other replicas do not."""

    def elsewhere(names: _Names, record: TensorRecord) -> bool:
        return _of_parameter(names, record.key) or _of_whole_run(names, record.key)

    def not_reduced(names: _Names, record: TensorRecord) -> bool:
        return record.key.role is not Role.REDUCED_GRAD

    found = replicas_of(_without(facts.run, elsewhere))
    reduced: tuple[ReplicasDiffer, ...] = ()
    if found.differing and found.differing[0].key.phase in BEFORE_REDUCTION:
        reduced = replicas_of(_without(facts.run, not_reduced)).differing
    return _alone(facts) or _answer(found, reduced, late=_late(facts))


def _among_replicas(facts: RunFacts) -> Answer:
    return _alone(facts) or _answer(replicas_of(facts.run))


def _of_parameter(names: _Names, key: RecordKey) -> bool:
    """Tell whether a record is of a parameter, and alike on all replicas."""
    if key.phase in BEFORE_REDUCTION:
        return False
    return key.fqn in names if key.role is Role.HYPERPARAMETER else parameter_of(key, names) is not None


def _names(rank: RankRecords) -> _Names:
    return frozenset(parameter.fqn for parameter in rank.parameters)


def _of_whole_run(names: _Names, key: RecordKey) -> bool:
    """Tell whether a record is of no parameter, and alike on all ranks."""
    return (
        (key.role is Role.LOSS and key.microbatch == NO_MICROBATCH)
        or (key.role is Role.GRAD_NORM and not key.slot)
        or (key.role is Role.HYPERPARAMETER and not _of_parameter(names, key))
    )


def _shared(facts: RunFacts) -> Iterator[tuple[int, TensorRecord]]:
    late = _late(facts)
    names = {number: _names(rank) for number, rank in facts.ranks.items()}
    for kind in _SHARED:
        for rank, record in facts.everywhere(*kind):
            mine = names[rank]
            if _of_parameter(mine, record.key) and not (late and _is_late(mine, record)):
                yield rank, record


def _of_all(facts: RunFacts) -> Iterator[tuple[int, TensorRecord]]:
    names = {number: _names(rank) for number, rank in facts.ranks.items()}
    for kind in facts.kinds:
        if kind[1] in (Role.LOSS, Role.GRAD_NORM, Role.HYPERPARAMETER):
            for rank, record in facts.everywhere(*kind):
                if _of_whole_run(names[rank], record.key):
                    yield rank, record


@invariant(
    "parallel.replicas_differ",
    holds="what several ranks hold a copy of (over TP, over DP after the reduction, tied over PP) is equal",
    unit="tensors with copies",
    span=[
        each_replica(_in_replica),
        each_stage(*_SHARED, keep=_shared, ask=_among_replicas),
        whole_run(keep=_of_all, ask=_among_replicas),
    ],
)
def replicas_differ(facts: RunFacts) -> Answer:
    """Name the first tensor whose copies are none, and how many follow."""
    alone = _alone(facts)
    late = _late(facts)
    return alone or _answer(replicas_of(_without(facts.run, _is_late) if late else facts.run), late=late)


def _has_late(run: Run) -> bool:
    """Tell whether each rank recorded all parameters whole after a step, and not what it updated alone."""
    return all(
        {record.key.fqn for record in rank.records if _is_late(frozenset(), record)} >= _names(rank)
        for rank in run.ranks.values()
    )


def _without(run: Run, left: Callable[[_Names, TensorRecord], bool]) -> Run:
    """Return a run without some records, which are told by the names of their rank's parameters."""
    ranks = {}
    for number, rank in run.ranks.items():
        names = _names(rank)
        ranks[number] = replace(rank, records=tuple(r for r in rank.records if not left(names, r)))
    return replace(run, ranks=ranks)


def _is_late(names: _Names, record: TensorRecord) -> bool:
    """Tell whether it is a whole parameter after a step, whose gather is still to come."""
    return record.key.phase is Phase.OPTIMIZER and record.key.role is Role.PARAM and record.part is None


def _first(found: Sequence[ReplicasDiffer]) -> tuple[ReplicasDiffer, str]:
    """Return the first difference that is one, and a word on what was before it.

    Where dW of a parameter differs, and nothing that it was computed from does, the ranks have parts of a
    sum: it is the reduction that is missing.
    """
    first = found[0]
    if first.key.phase in BEFORE_REDUCTION:
        reduced = [
            one
            for one in found
            if (one.key.step, one.key.fqn, one.key.role) == (first.key.step, first.key.fqn, Role.REDUCED_GRAD)
        ]
        if reduced:
            return reduced[0], "dW of the ranks are parts of a sum: what they were computed from agrees"
    return first, ""


def _finding(replicas: Replicas, reduced: Sequence[ReplicasDiffer]) -> Partial:
    found = replicas.differing
    first, before = _first((*found, *reduced))
    groups = " and ".join(f"ranks {', '.join(map(str, ranks))}" for ranks in first.ranks)
    return Partial(
        id="parallel.replicas_differ",
        severity=Severity.ERROR,
        confidence=0.97,
        title=f"{first.key.fqn or '(model)'}: the copies of {_what(first.key)} on different ranks differ",
        evidence=(
            f"first: {first.key.describe()}",
            f"{groups} hold different bits",
            *([before] if before else []),
            f"{count(len(found), 'record')} in all, of {len({one.key.fqn for one in found})} names",
        ),
        remedy=kept_equal_by(first.key.phase),
        where=first.key,
        order=replicas.order,
        count=len(found),
    )


def _what(key: RecordKey) -> str:
    return f"{key.role.value}[{key.slot}]" if key.slot else key.role.value
