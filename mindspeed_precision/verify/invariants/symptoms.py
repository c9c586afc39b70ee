"""What a person would see in the log: symptoms of the loss and the gradient norm, gradients of zeros."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from mindspeed_precision.records import NO_MICROBATCH, Finding, Phase, RecordKey, Role, Severity, TensorRecord
from mindspeed_precision.symptoms import FEWEST, Symptom, symptoms
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import whole_run

_REMEDIES = {
    "symptom.loss_constant": "look whether parameters move (lr, requires_grad, optimizer), and data change",
    "symptom.loss_runs_away": "look at the learning rate, and at what `check` says of the first steps",
    "symptom.loss_spike": "record the step before and this one: the update before a jump is its cause",
    "symptom.loss_oscillates": "look at the learning rate, the order of the data, and clipping",
    "symptom.grad_norm_spike": "record this step: what jumps first is in its backward pass or its batch",
}


def _logged(facts: RunFacts) -> Iterator[tuple[int, TensorRecord]]:
    for kind in ((Phase.LOSS, Role.LOSS), (Phase.CLIP, Role.GRAD_NORM)):
        for rank, record in facts.everywhere(*kind):
            if record.key.microbatch == NO_MICROBATCH:
                yield rank, record


@invariant(
    *_REMEDIES,
    holds="the loss moves, does not jump, swing or run away; the gradient norm does not jump",
    unit="steps",
    span=[whole_run(keep=_logged)],
)
def of_the_log(facts: RunFacts) -> Answer:
    """Look at the losses and norms that a log prints."""
    losses, norms = _series(facts, Phase.LOSS, Role.LOSS), _series(facts, Phase.CLIP, Role.GRAD_NORM)
    looked = len(losses.keys() | norms.keys())
    seen = symptoms(
        [(step, value) for step, (value, _) in sorted(losses.items())],
        [(step, value) for step, (value, _) in sorted(norms.items())],
    )
    findings = tuple(_finding(one, norms if "norm" in one.id else losses) for one in seen)
    skipped = "" if looked > FEWEST else f"a jump is told from more than {FEWEST} steps"
    return Answer(exercised=looked, findings=findings, skipped=skipped)


_Values = Mapping[int, tuple[float, RecordKey]]


def _series(facts: RunFacts, phase: Phase, role: Role) -> _Values:
    """Return one number of each step, of the first rank that has it."""
    found: dict[int, tuple[float, RecordKey]] = {}
    for _, record in facts.everywhere(phase, role):
        key, value = record.key, record.value
        named = key.slot in ("lm loss", "loss") if role is Role.LOSS else not key.slot
        if key.microbatch == NO_MICROBATCH and named and value is not None and key.step >= 0:
            found.setdefault(key.step, (value, key))
    return found


def _finding(symptom: Symptom, values: _Values) -> Finding:
    return Finding(
        id=symptom.id,
        severity=Severity.WARNING,
        confidence=0.6,
        title=symptom.title,
        evidence=(symptom.evidence,),
        remedy=_REMEDIES[symptom.id],
        where=values[symptom.step][1],
    )


def _enough(facts: RunFacts) -> Iterator[tuple[int, TensorRecord]]:
    """Yield of each parameter one gradient that is not zero, or else one of each step."""
    zero: dict[str, dict[int, tuple[int, TensorRecord]]] = defaultdict(dict)
    seen: dict[str, tuple[int, TensorRecord]] = {}
    for rank, record in facts.everywhere(Phase.REDUCE, Role.REDUCED_GRAD):
        name, statistics = record.key.fqn, record.digest.statistics
        if statistics is None:
            continue
        if record.numel - statistics.zeros:
            seen.setdefault(name, (rank, record))
        else:
            zero[name].setdefault(record.key.step, (rank, record))
    yield from seen.values()
    for name, by_step in zero.items():
        if name not in seen:
            yield from by_step.values()


@invariant(
    "symptom.zero_gradient",
    holds="a trainable parameter has a gradient that is not zero in some step",
    unit="parameters",
    span=[whole_run(keep=_enough)],
)
def zero_gradients(facts: RunFacts) -> Answer:
    """Find parameters whose reduced gradient is zero in every step while those of others are not."""
    nonzero: dict[str, int] = defaultdict(int)
    steps: dict[str, set[int]] = defaultdict(set)
    first: dict[str, RecordKey] = {}
    names = {name for rank in facts.ranks for name in facts.parameters(rank)}
    for _, record in facts.everywhere(Phase.REDUCE, Role.REDUCED_GRAD):
        name, statistics = record.key.fqn, record.digest.statistics
        if name in names and statistics is not None:
            nonzero[name] += record.numel - statistics.zeros
            steps[name].add(record.key.step)
            first.setdefault(name, record.key)
    zero = [name for name in steps if not nonzero[name] and len(steps[name]) > 1 and ".experts." not in name]
    if not zero or len(zero) == len(steps):
        skipped = "" if steps else "no reduced gradient with statistics was recorded"
        return Answer(exercised=len(steps), skipped=skipped)
    finding = Finding(
        id="symptom.zero_gradient",
        severity=Severity.WARNING,
        confidence=0.8,
        title=f"the gradient of {zero[0]} is zero in every step"
        + (f", and that of {len(zero) - 1} others" if len(zero) > 1 else ""),
        evidence=(f"{len(zero)} of {len(steps)} parameters: {', '.join(zero[:8])}",),
        remedy="look whether the parameter is used in the forward pass, and whether its gradient is cut off "
        "(detach, no_grad, a mask) or too small for its type",
        where=first[zero[0]],
    )
    return Answer(exercised=len(steps), failed=len(zero), findings=(finding,))
