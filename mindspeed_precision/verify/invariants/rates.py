"""The schedule: stepped once by each update, and what it gives is what the optimizer uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_precision.errors import ConfigError
from mindspeed_precision.records import Phase, RecordKey, Role, TensorRecord
from mindspeed_precision.verify.failures import Failure, failure, findings_of
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.schedule import Schedule, curves_of, schedule_of
from mindspeed_precision.verify.spans import each_rank
from mindspeed_precision.verify.updates import Update, updates

SCHEDULE = "schedule"
_RELATIVE = 1e-6
"""A learning rate may be kept in float32."""


@dataclass(frozen=True, kw_only=True)
class _Stepped:
    """What a training step did to the schedule: its count before and after, and how often it was stepped."""

    before: float
    after: float
    calls: int
    record: TensorRecord


def _stepped(facts: RunFacts, rank: int) -> dict[int, _Stepped]:
    """Return what each step did to the schedule; steps that did nothing are left out."""
    found: dict[int, _Stepped] = {}
    increments: dict[tuple[int, int], float] = {}
    for record in facts.of(rank, Phase.OPTIMIZER, Role.HYPERPARAMETER):
        key, value = record.key, record.value
        if key.fqn != SCHEDULE or value is None:
            continue
        if key.slot == "increment":
            increments[key.step, key.occurrence] = value
        elif key.slot == "num_steps":
            known = found.get(key.step)
            before = known.before if known else value - increments.get((key.step, key.occurrence), 0.0)
            calls = (known.calls if known else 0) + bool(increments.get((key.step, key.occurrence)))
            found[key.step] = _Stepped(before=before, after=value, calls=calls, record=record)
    return found


@invariant(
    "schedule.stepped_wrongly",
    holds="the schedule is stepped once by each step that updates, and by nothing else",
    unit="steps",
    span=[each_rank()],
)
def schedule_is_stepped_once(facts: RunFacts) -> Answer:
    """Follow the schedule's count through the steps; it must go with the optimizer's."""
    failures: list[Failure] = []
    exercised = 0
    for rank in facts.ranks:
        steps = _stepped(facts, rank)
        exercised += len(steps)
        for step, found in steps.items():
            wrong = _wrong_step(found, steps.get(step - 1))
            if wrong:
                failures.append(failure(found.record, rank, *wrong))
        failures += _against_updates(facts, rank, steps)
    return Answer(
        exercised=exercised,
        findings=findings_of(
            failures,
            id="schedule.stepped_wrongly",
            title="the schedule of the learning rate was not stepped once by each update",
            remedy="call opt_param_scheduler.step once after each successful optimizer step, and let a "
            "checkpoint set its count once: both in the loading and in the loop is twice",
        ),
        failed=len(failures),
        skipped="" if exercised else "no schedule of Megatron's was stepped inside a recorded step",
    )


def _wrong_step(found: _Stepped, before: _Stepped | None) -> tuple[str, str] | None:
    if found.calls > 1:
        return f"its count went from {found.before:g} to {found.after:g} in {found.calls} calls", (
            "it was stepped more than once in a step"
        )
    if before is not None and before.after != found.before:
        text = f"its count was {before.after:g} after the step before, and {found.before:g} in this one"
        return text, "it was changed between two steps"
    return None


def _against_updates(facts: RunFacts, rank: int, steps: Mapping[int, _Stepped]) -> Iterator[Failure]:
    """Compare the schedule's count with the optimizer's where it began to be recorded.

    Both grow with updates alone, so that their ratio is the increment, while the batch size does not change.
    """
    arguments = facts.config.get("megatron_args", {})
    if not steps or arguments.get("rampup_batch_size"):
        return
    first = min(steps)
    size = steps[first].after - steps[first].before
    counts = {
        update.numbers["step"] for update in updates(facts, rank) if update.step == first and update.counter
    }
    if steps[first].calls != 1 or size <= 0 or len(counts) != 1:
        return
    made = counts.pop()
    if steps[first].before != made * size and made + steps[first].before > 0:
        text = f"its count is {steps[first].before:g} after {made:g} updates, and grows by {size:g} with each"
        yield failure(steps[first].record, rank, text, "its count does not go with the number of updates")


_NOTED = {
    "warmup": "lr_warmup_steps",
    "decay": "lr_decay_steps",
    "style": "lr_decay_style",
    "wsd_decay": "wsd_decay_steps",
    "wsd_style": "lr_wsd_decay_style",
    "wd_samples": "wd_incr_steps",
    "wd_style": "wd_incr_style",
    **{name: name for name in ("init_lr", "max_lr", "min_lr", "start_wd", "end_wd")},
}
"""Attributes of Megatron's scheduler, as a run notes them (``config.schedule``), by those of ``Schedule``."""

_NUMBERS = ("warmup", "decay", "wd_samples", "init_lr", "max_lr", "min_lr", "start_wd", "end_wd")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def schedules(facts: RunFacts) -> tuple[Schedule | None, Schedule | None]:
    """Return the schedule that the run stepped, and the one that its arguments ask for; None: not known."""
    noted = facts.config.get("schedule")
    known: dict[str, Any] = {name: noted.get(key) for name, key in _NOTED.items()} if noted else {}
    # a scheduler of another class may keep its numbers otherwise
    stepped = Schedule(**known) if known and all(_is_number(known[name]) for name in _NUMBERS) else None
    try:
        return stepped, schedule_of(facts.config.get("megatron_args", {}))
    except ConfigError:
        return stepped, None


@invariant(
    "schedule.lr",
    "schedule.weight_decay",
    holds="each step uses the learning rate and the weight decay that the schedule gives at its count",
    unit="updates",
    span=[each_rank()],
)
def numbers_are_as_scheduled(facts: RunFacts) -> Answer:
    """Compute the schedule at the count of each step and compare what the optimizer used."""
    effective, asked = schedules(facts)
    schedule = effective or asked
    if schedule is None:
        return Answer(
            exercised=0,
            skipped="no schedule is known: it is not Megatron's, or was never stepped in a recorded step",
        )
    lr: list[Failure] = []
    decay: list[Failure] = []
    exercised = 0
    planned = dict(enumerate(_planned(facts))) if effective is None else {}
    for rank in facts.ranks:
        counts = planned | {step: found.before for step, found in _stepped(facts, rank).items()}
        for update in updates(facts, rank):
            count = counts.get(update.step)
            if count is None:
                continue
            exercised += 1
            lr += _wrong_lr(facts, update, schedule, count)
            decay += _wrong_decay(update, schedule, count)
    remedy = (
        "who sets the parameter groups beside the schedule? a scheduler stepped twice, or a group "
        "left out of it"
    )
    return Answer(
        exercised=exercised,
        findings=findings_of(
            lr, id="schedule.lr", title="the learning rate is not the schedule's", remedy=remedy
        )
        + findings_of(
            decay, id="schedule.weight_decay", title="the weight decay is not the schedule's", remedy=remedy
        ),
        failed=len(lr) + len(decay),
        skipped="" if exercised else "no update was recorded together with the schedule's count",
    )


def _planned(facts: RunFacts) -> Sequence[int]:
    """Return by step the samples before it as arguments have it; nothing where steps may be skipped."""
    arguments = facts.config.get("megatron_args", {})
    if arguments.get("fp16"):
        return ()
    try:
        return curves_of(arguments).consumed
    except ConfigError:
        return ()


def _wrong_lr(facts: RunFacts, update: Update, schedule: Schedule, count: float) -> list[Failure]:
    arguments = facts.config.get("megatron_args", {})
    own, lowest = arguments.get("decoupled_lr"), arguments.get("decoupled_min_lr")
    expected = [schedule.lr(count)]
    if _is_number(own):
        expected.append(schedule.lr(count, max_lr=own, min_lr=lowest if _is_number(lowest) else None))
    known = [value * update.numbers.get("lr_mult", 1.0) for value in expected]
    known += expected  # later versions do not multiply
    used = update.numbers["lr"]
    if any(_close(used, value) for value in known):
        return []
    text = f"lr {used:.8g}, the schedule gives {known[0]:.8g} at its count of {count:g}"
    return [_at(update, "lr", text)]


def _wrong_decay(update: Update, schedule: Schedule, count: float) -> list[Failure]:
    expected, used = schedule.weight_decay(count), update.numbers.get("weight_decay")
    if used is None or "wd_mult" not in update.numbers:
        return []
    expected *= update.numbers["wd_mult"]
    if _close(used, expected):
        return []
    text = f"weight decay {used:.8g}, the schedule gives {expected:.8g} at its count of {count:g}"
    return [_at(update, "weight_decay", text)]


def _close(one: float, two: float) -> bool:
    return abs(one - two) <= _RELATIVE * max(abs(one), abs(two))


def _at(update: Update, slot: str, text: str) -> Failure:
    where = RecordKey(
        step=update.step, phase=Phase.OPTIMIZER, fqn=update.fqn, role=Role.HYPERPARAMETER, slot=slot
    )
    return Failure(where=where, rank=update.rank, seq=update.gradient.seq, found=text)
