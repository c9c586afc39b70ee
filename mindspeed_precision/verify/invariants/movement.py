"""What the optimizer had to move moved, and nothing else did."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from mindspeed_precision.align.forced import loaded_states
from mindspeed_precision.compare.movement import Unmoved, movement_of
from mindspeed_precision.records import INIT_STEP, Phase, Role, Severity, TensorRecord
from mindspeed_precision.verify.failures import Failure, failure, findings_of
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.partial import Partial
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import each_rank, each_stage


def _small_where_none_moved(
    findings: Sequence[Partial], exercised: int, failed: int
) -> tuple[Sequence[Partial], int]:
    """Leave out updates that rounding may have swallowed where others moved something."""
    if exercised == failed:
        return findings, failed
    small = [one for one in findings if one.severity is Severity.WARNING]
    return [one for one in findings if one not in small], failed - sum(one.count for one in small)


@invariant(
    "optimizer.parameters_unmoved",
    holds="every parameter with a learning rate above 0 and a gradient moves",
    unit="updates",
    span=[each_rank()],
    settle=_small_where_none_moved,
)
def updated_parameters_move(facts: RunFacts) -> Answer:
    """Compare bits of every updated parameter with those before the step."""
    forced = dict.fromkeys(loaded_states(facts.run))
    movement = movement_of(facts.run, facts.ranks, facts.steps, forced)
    exercised = movement.moved + len(movement.unmoved)
    errors = [one for one in movement.unmoved if not one.rounded]
    small = [one for one in movement.unmoved if one.rounded]
    title = "a parameter has the same bits after an update as before it"
    remedy = (
        "does the optimizer write into the parameters that the model uses? are its groups those of "
        "this model?"
    )

    def failures(unmoved: list[Unmoved]) -> list[Failure]:
        return [
            Failure(where=one.key, rank=one.rank, seq=0, found=f"lr {one.lr:g}, {_norm(one.gradient)}")
            for one in unmoved
        ]

    return Answer(
        exercised=exercised,
        findings=findings_of(failures(errors), id="optimizer.parameters_unmoved", title=title, remedy=remedy)
        + findings_of(
            failures(small),
            id="optimizer.parameters_unmoved",
            title=f"no parameter moved, and rounding may be why: {title}",
            remedy=remedy,
            severity=Severity.WARNING,
            confidence=0.6,
        ),
        failed=len(errors) + len(small),
        skipped=""
        if exercised
        else "no update was recorded with the parameter before it (capture.optimizer)",
    )


def _norm(gradient: float | None) -> str:
    return "its gradient is not zero" if gradient is None else f"norm of the gradient {gradient:.6g}"


def _states_and_rates(facts: RunFacts) -> Iterator[tuple[int, TensorRecord]]:
    for phase in (Phase.INIT, Phase.OPTIMIZER):
        yield from facts.everywhere(phase, Role.PARAM)
    for rank, record in facts.everywhere(Phase.OPTIMIZER, Role.HYPERPARAMETER):
        if record.key.slot == "lr":
            yield rank, record


@invariant(
    "optimizer.moved_without_update",
    holds="a parameter that no optimizer updated in a step, or that is frozen, keeps its bits",
    unit="parameters x steps",
    span=[
        each_stage(
            (Phase.INIT, Role.PARAM),
            (Phase.OPTIMIZER, Role.PARAM),
            (Phase.OPTIMIZER, Role.HYPERPARAMETER),
            keep=_states_and_rates,
        )
    ],
)
def others_stay(facts: RunFacts) -> Answer:
    """Compare bits of parameters without an update, or at lr 0, with those before the step."""
    if facts.config.get("ddp_config", {}).get("overlap_param_gather"):
        reason = (
            "parameters are gathered after the step (overlap_param_gather): when they moved is not recorded"
        )
        return Answer(exercised=0, skipped=reason)
    rates = _rates(facts)
    forced = loaded_states(facts.run)
    # whoever updates a parameter may be a rank that did not record, or an optimizer that is not observed
    world = next(iter(facts.ranks.values())).coordinates.world_size
    complete = facts.rated and len(facts.coordinates) == world
    failures: list[Failure] = []
    exercised = 0
    for number, rank in facts.ranks.items():
        known = {parameter.fqn: parameter for parameter in rank.parameters}
        before: dict[str, TensorRecord] = {}
        for record in rank.records:
            key = record.key
            if (
                key.role is not Role.PARAM
                or key.phase not in (Phase.INIT, Phase.OPTIMIZER)
                or key.fqn not in known
            ):
                continue
            earlier, before[key.fqn] = before.get(key.fqn), record
            if earlier is None or key.step in forced or not _follows(facts, earlier, record):
                continue
            placement = known[key.fqn].placement
            name = (placement.copy_of if placement else "") or known[key.fqn].tied_to or key.fqn
            if known[key.fqn].trainable and not complete:
                continue
            rate = max(rates.get((key.step, name), 0.0), rates.get((key.step, key.fqn), 0.0))
            if rate > 0 and known[key.fqn].trainable:
                continue
            exercised += 1
            if earlier.digest.fingerprint != record.digest.fingerprint:
                failures.append(
                    failure(record, number, *_why(known[key.fqn].trainable, (key.step, name) in rates))
                )
    return Answer(
        exercised=exercised,
        findings=findings_of(
            failures,
            id="optimizer.moved_without_update",
            title="a parameter moved that no optimizer should have moved",
            remedy="what writes into it: an optimizer that is not observed, a load, a broadcast, a "
            "buffer that it shares?",
            confidence=0.9,
        ),
        failed=len(failures),
        applies=exercised > 0,
        skipped="" if exercised else "every parameter was updated in every step",
    )


def _follows(facts: RunFacts, earlier: TensorRecord, record: TensorRecord) -> bool:
    """Tell whether no step that was not recorded came between."""
    began = facts.run.manifest.get("first_step")
    at_first = record.key.step == (began if isinstance(began, int) else INIT_STEP + 1)
    return earlier.key.step == record.key.step - 1 or (earlier.key.step == INIT_STEP and at_first)


def _rates(facts: RunFacts) -> dict[tuple[int, str], float]:
    """Return the largest learning rate with which any rank updated a parameter in a step."""
    found: dict[tuple[int, str], float] = defaultdict(float)
    for number, record in facts.everywhere(Phase.OPTIMIZER, Role.HYPERPARAMETER):
        if record.key.slot != "lr":
            continue
        rate = math.inf if record.value is None else record.value  # without statistics it is not known
        parameter = facts.parameters(number).get(record.key.fqn)
        placement = parameter.placement if parameter else None
        for name in {record.key.fqn, (placement.copy_of if placement else "") or record.key.fqn}:
            found[record.key.step, name] = max(found[record.key.step, name], rate)
    return dict(found)


def _why(trainable: bool, updated: bool) -> tuple[str, str]:
    if not trainable:
        return "it is frozen", "frozen"
    return ("its learning rate is 0", "lr 0") if updated else ("no optimizer updated it", "not updated")
