"""Learning rate, weight decay, batch size and length of training, as curves over all steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mindspeed_precision.counting import count
from mindspeed_precision.records import NO_MICROBATCH, Finding, Phase, RecordKey, Role, Severity, Side
from mindspeed_precision.verify.pair.registry import pair_check
from mindspeed_precision.verify.pair_facts import PairFacts
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.schedule import Curves

_CURVES: dict[str, tuple[str, Callable[[Curves], Sequence[float]], str]] = {
    "schedule.lr_differs": (
        "learning rate",
        lambda curves: curves.lr,
        "make --lr, --min-lr, the warm-up, the decay and the length of training the same",
    ),
    "schedule.weight_decay_differs": (
        "weight decay",
        lambda curves: curves.weight_decay,
        "make --weight-decay, --start-weight-decay, --end-weight-decay and their style the same",
    ),
    "schedule.batch_size_differs": (
        "number of samples",
        lambda curves: curves.batch_size,
        "make --global-batch-size and the ramp-up the same",
    ),
    "schedule.consumed_differs": (
        "number of samples consumed before it",
        lambda curves: curves.consumed,
        "make the batch sizes of all steps before the same",
    ),
}


@pair_check(
    *_CURVES,
    "schedule.steps_differ",
    holds="learning rate, weight decay, batch size and consumed samples are the same at every step",
    unit="steps",
)
def schedules(facts: PairFacts) -> Answer:
    """Compare the curves, and say at which step they part first and by how much at most."""
    judged = facts.schedules
    if len(judged.curves) < 2:
        return Answer(exercised=0, skipped=judged.missing)
    one, two = judged.curves[Side.BASELINE], judged.curves[Side.CANDIDATE]
    findings = [
        finding
        for id_, (what, curve, remedy) in _CURVES.items()
        if (finding := _compare(id_, what, curve(one), curve(two), remedy)) is not None
    ]
    if len(one.lr) != len(two.lr):
        findings.append(_lengths(len(one.lr), len(two.lr), same=not findings))
    return Answer(exercised=min(len(one.lr), len(two.lr)), findings=tuple(findings))


def _compare(id_: str, what: str, one: Sequence[float], two: Sequence[float], remedy: str) -> Finding | None:
    apart = [step for step, (left, right) in enumerate(zip(one, two, strict=False)) if left != right]
    if not apart:
        return None
    first = apart[0]
    most = max(apart, key=lambda step: abs(one[step] - two[step]))
    return Finding(
        id=id_,
        severity=Severity.ERROR,
        confidence=0.97,
        title=f"the {what} of a step differs from step {first} on",
        evidence=(
            f"step {first}: {one[first]:.8g} in the baseline, {two[first]:.8g} in the candidate",
            f"largest difference at step {most}: {one[most]:.8g} and {two[most]:.8g}",
            f"{len(apart)} of {min(len(one), len(two))} steps differ",
        ),
        remedy=remedy,
        where=RecordKey(
            step=first,
            microbatch=NO_MICROBATCH,
            phase=Phase.OPTIMIZER,
            fqn="",
            role=Role.HYPERPARAMETER,
            slot=what.replace(" ", "_"),
        ),
    )


def _lengths(one: int, two: int, *, same: bool) -> Finding:
    until = "until the shorter one ends they are the same" if same else "other curves differ, too"
    return Finding(
        id="schedule.steps_differ",
        severity=Severity.WARNING,
        confidence=0.9,
        title=f"the baseline trains {count(one, 'step')}, the candidate {two}",
        evidence=(until,),
        remedy="use the same --train-iters or --train-samples, or say --lr-decay-iters in both",
    )
