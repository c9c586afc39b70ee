"""What a run did not exercise: no check may look like agreement about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from mindspeed_precision.dump.reader import MissingRanks
from mindspeed_precision.records import Finding, Phase, Role, Severity, TensorRecord
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import whole_run

_GRADIENTS = (
    (Phase.WGRAD, Role.WGRAD),
    (Phase.WGRAD, Role.BGRAD),
    (Phase.ACCUMULATE, Role.MAIN_GRAD),
    (Phase.REDUCE, Role.REDUCED_GRAD),
)


def _examples(facts: RunFacts) -> Iterator[tuple[int, TensorRecord]]:
    """Yield one record of each thing that a run may not have done: of one that it did, where there is one."""
    gradients = [one for kind in _GRADIENTS for one in facts.everywhere(*kind)]
    yield from _example(gradients, lambda record: not _all_zero(record))
    numbers = list(facts.everywhere(Phase.OPTIMIZER, Role.HYPERPARAMETER))
    rates = [(rank, record) for rank, record in numbers if record.key.slot == "lr"]
    yield from _example(rates, lambda record: record.value != 0)
    yield from numbers[:1]
    yield from islice(facts.everywhere(Phase.OPTIMIZER, Role.PARAM), 1)


def _example(
    found: Sequence[tuple[int, TensorRecord]], does: Callable[[TensorRecord], bool]
) -> Sequence[tuple[int, TensorRecord]]:
    first = next((one for one in found if does(one[1])), None)
    return found[:1] if first is None else [first]


def _all_zero(record: TensorRecord) -> bool:
    statistics = record.digest.statistics
    return statistics is not None and statistics.zeros == record.numel


@invariant(
    "vacuous.no_records",
    "vacuous.no_gradient",
    "vacuous.lr_zero",
    "vacuous.no_update",
    holds="the run has steps with gradients that are not zero and updates at a learning rate above zero",
    unit="steps",
    span=[whole_run(keep=_examples)],
)
def exercised(facts: RunFacts) -> Answer:
    """Say what the run never did."""
    steps = facts.steps
    if not steps:
        finding = _vacuous("vacuous.no_records", "no whole step was recorded", "record at least one step")
        return Answer(exercised=0, findings=(finding,), skipped="no whole step was recorded")
    findings = [
        finding for finding in (_gradients(facts), _rates(facts), _updates(facts)) if finding is not None
    ]
    return Answer(exercised=len(steps), findings=tuple(findings))


def _gradients(facts: RunFacts) -> Finding | None:
    records = [record for kind in _GRADIENTS for _, record in facts.everywhere(*kind)]
    if not records:
        return _vacuous(
            "vacuous.no_gradient",
            "no gradient was recorded: the backward pass is unseen",
            "set capture.wgrad=true",
        )
    if all(map(_all_zero, records)):
        return _vacuous(
            "vacuous.no_gradient", "every gradient is zero", "look at the loss, its mask and requires_grad"
        )
    return None


def _rates(facts: RunFacts) -> Finding | None:
    rates = [r for _, r in facts.everywhere(Phase.OPTIMIZER, Role.HYPERPARAMETER) if r.key.slot == "lr"]
    if not rates or any(record.value != 0 for record in rates):
        return None
    return _vacuous(
        "vacuous.lr_zero",
        "the learning rate is zero in every recorded step: no update was exercised",
        "record a step after the warm-up begins, or set a learning rate",
    )


def _updates(facts: RunFacts) -> Finding | None:
    seen = {
        role
        for role in (Role.PARAM, Role.HYPERPARAMETER)
        if next(facts.everywhere(Phase.OPTIMIZER, role), None)
    }
    if seen != {Role.PARAM}:
        return None
    return _vacuous(
        "vacuous.no_update",
        "the optimizer was called and updated nothing in any recorded step",
        "record steps that fp16 does not skip for overflow (a smaller --initial-loss-scale); of an optimizer "
        "that is none of torch.optim's no update can be seen",
    )


@invariant(
    "coverage.run_stopped",
    "coverage.ranks_missing",
    holds="every rank recorded until the run ended as planned",
    unit="ranks",
    span=[whole_run()],
)
def ended(facts: RunFacts) -> Answer:
    """Name the ranks whose records end early, or are not there."""
    size = max(rank.coordinates.world_size for rank in facts.ranks.values())
    stopped = [number for number, rank in facts.ranks.items() if not rank.complete]
    last = {number: max(rank.steps, default=-1) for number, rank in facts.ranks.items()}
    findings = []
    if stopped or len(set(last.values())) != 1:
        findings.append(_stopped(facts, stopped))
    lost = facts.run.missing
    if lost is not None:
        findings.append(_lost(lost))
    chosen = len(facts.ranks) < size and not findings
    number = 0 if lost is None else lost.count
    return Answer(
        exercised=len(facts.ranks) + number,
        failed=max(len(stopped) + number, 1) if findings else 0,
        findings=tuple(findings),
        skipped=f"{len(facts.ranks)} of {size} ranks were to record" if chosen else "",
    )


def _stopped(facts: RunFacts, stopped: Sequence[int]) -> Finding:
    whole = (
        f"step {max(facts.steps)} is the last one that every rank has" if facts.steps else "no step is whole"
    )
    return Finding(
        id="coverage.run_stopped",
        severity=Severity.WARNING,
        confidence=1.0,
        title=f"{len(stopped)} of {len(facts.ranks)} ranks did not end as planned"
        if stopped
        else "the records of the ranks end at different steps",
        evidence=(whole, f"ranks {', '.join(map(str, stopped or sorted(facts.ranks)))}"),
        remedy="what is said of this run is said of its whole steps alone; look at the log for why it ended",
    )


def _lost(ranks: MissingRanks) -> Finding:
    return Finding(
        id="coverage.ranks_missing",
        severity=Severity.WARNING,
        confidence=1.0,
        title="ranks that were to record have no records: nothing is said of them",
        evidence=(ranks.text,),
        remedy="bring the directories of these ranks; record some ranks alone with the setting `ranks`",
    )


def _vacuous(id_: str, title: str, remedy: str) -> Finding:
    return Finding(
        id=id_,
        severity=Severity.WARNING,
        confidence=1.0,
        title=title,
        evidence=("that nothing was found would prove nothing",),
        remedy=remedy,
    )
