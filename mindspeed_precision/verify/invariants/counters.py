"""The optimizer's own count of updates: it begins at 0, grows by one, and goes on after a checkpoint."""

from __future__ import annotations

from mindspeed_precision.records import Phase, Role, Severity
from mindspeed_precision.verify.failures import Failure, failure, findings_of
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import each_rank
from mindspeed_precision.verify.updates import Update, updates


@invariant(
    "optimizer.step_counter",
    holds="the optimizer's step counter of a parameter grows by one with each update",
    unit="updates",
    span=[each_rank()],
)
def counter_grows_by_one(facts: RunFacts) -> Answer:
    """Follow the counter that each update found, from the first update on."""
    failures: list[Failure] = []
    exercised = 0
    for rank in facts.ranks:
        earlier: Update | None = None
        for update in updates(facts, rank):
            follows = earlier is not None and earlier.fqn == update.fqn and bool(update.before)
            before, earlier = (earlier if follows else None), update
            if update.counter is None:
                continue
            exercised += 1
            wrong = _wrong_count(update, before, facts)
            if wrong:
                failures.append(failure(update.counter, rank, *wrong))
    return Answer(
        exercised=exercised,
        findings=findings_of(
            failures,
            id="optimizer.step_counter",
            title="the optimizer's step counter did not grow by one",
            remedy="was the optimizer's state lost, loaded or stepped beside the training step? the "
            "bias correction of Adam is of this number",
        ),
        failed=len(failures),
        skipped="" if exercised else "no step counter was recorded (capture.optimizer)",
    )


def _wrong_count(update: Update, before: Update | None, facts: RunFacts) -> tuple[str, str] | None:
    found = update.numbers["step"]
    if before is not None and "step" in before.numbers:
        grown = found - before.numbers["step"]
        if grown == 1:
            return None
        earlier = before.numbers["step"]
        text = f"{earlier:g} before the update of step {before.step}, {found:g} before that of {update.step}"
        return text, "it was set back to 0" if found == 0 else f"it grew by {grown:g}"
    began = facts.run.manifest.get("first_step")
    recorded = {record.key.step for record in facts.of(update.rank, Phase.OPTIMIZER, Role.PARAM)}
    if any(step not in recorded for step in range(update.step)):
        return None  # steps before it were not recorded (setting `steps`): they counted, too
    if update.first and began == 0 and found != 0 and not facts.config.get("megatron_args", {}).get("load"):
        return f"it is {found:g} before the first update of the training", "it did not begin at 0"
    return None


@invariant(
    "optimizer.state_reset",
    holds="a training that goes on from a checkpoint goes on with the optimizer's state",
    unit="resumed ranks",
    span=[each_rank()],
)
def resumed_state_is_there(facts: RunFacts) -> Answer:
    """Look at the optimizer's counter in the first step of a training that does not begin at step 0."""
    began = facts.run.manifest.get("first_step")
    if not isinstance(began, int) or began <= 0:
        return Answer(exercised=0, applies=False, skipped="the training begins at step 0")
    failures: list[Failure] = []
    exercised = 0
    for rank in facts.ranks:
        first = [
            update for update in updates(facts, rank) if update.step == began and update.counter is not None
        ]
        exercised += bool(first)
        failures += [
            failure(update.counter, rank, f"it has made {update.numbers['step']:g} updates")
            for update in first
            if update.counter is not None and update.numbers["step"] == 0
        ]
    meant = bool(facts.config.get("megatron_args", {}).get("no_load_optim"))
    return Answer(
        exercised=exercised,
        findings=findings_of(
            failures,
            id="optimizer.state_reset",
            title=f"the training goes on at step {began}, but the optimizer begins anew",
            remedy="load the optimizer's state with the parameters; --no-load-optim leaves it out",
            severity=Severity.INFO if meant else Severity.WARNING,
            confidence=0.8,
        ),
        failed=len(failures),
        skipped="" if exercised else "the first step after the checkpoint was not recorded",
    )
