"""What did not repeat: an operation of equal inputs, or a state that a checkpoint did not give back."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_precision.certify.repetition import Repetition
from mindspeed_precision.records import Comparison, Finding, Origin, Phase, RecordKey, Role, Severity

OPERATION = "determinism.operation"
IDS = (
    OPERATION,
    "determinism.random_state",
    "determinism.resume_data",
    "determinism.resume_optimizer",
    "determinism.resume_random_state",
    "determinism.resume_schedule",
    "determinism.resume_weights",
    "determinism.resume_not_loaded",
)
"""Every finding that ``certify`` gives by itself."""

_SHOWN = 3
_SCHEDULED = ("lr", "weight_decay", "lr_mult", "wd_mult", "max_lr", "min_lr")
_STATES = (Role.EXP_AVG, Role.EXP_AVG_SQ, Role.MASTER_PARAM)

_REMEDIES = {
    "determinism.random_state": "seed every generator alike; a draw that depends on time or order "
    "moves them apart",
    "determinism.operation": "an algorithm that repeats for this operation (preflight lists the switches); "
    "`compare` of the two runs shows what followed from it",
    "determinism.resume_data": "the sampler must go on at the consumed samples that the checkpoint holds",
    "determinism.resume_optimizer": "save and load the optimizer: no --no-save-optim, --no-load-optim, "
    "--finetune; the moments, the master weights and the step counter belong to it",
    "determinism.resume_random_state": "save and load random states: no --no-save-rng, --no-load-rng, "
    "--finetune",
    "determinism.resume_schedule": "the scheduler must be loaded once and not be stepped again, and its "
    "arguments must be those of the first run",
    "determinism.resume_weights": "the parameters that were loaded are not those that were saved",
    "determinism.resume_not_loaded": "give --load the directory that the first part saved to, and "
    "--exit-on-missing-checkpoint",
}


def name_differences(repetition: Repetition, *, resumed: bool) -> Iterator[Finding]:
    """Yield a finding for each thing that did not repeat, the first one first.

    Args:
        repetition: of two runs.
        resumed: the second run began from a checkpoint.
    """
    loaded = repetition.began if resumed else None
    random = next((one for one in repetition.different if one.key.role is Role.RNG), None)
    groups: dict[str, list[Origin]] = {}
    drawn: list[Origin] = []
    for origin in repetition.origins:
        id_ = _id(origin.key, loaded)
        by_chance = random is not None and origin.key.step >= random.key.step
        if origin.key.role is not Role.RNG:
            (drawn if by_chance and id_ == OPERATION else groups.setdefault(id_, [])).append(origin)
    if random is not None:
        yield _random_finding(random, drawn, repetition, resumed=random.key.step == loaded)
    for id_, origins in groups.items():
        if origins:
            yield _finding(id_, origins, repetition)


def _random_finding(
    random: Comparison, drawn: list[Origin], repetition: Repetition, *, resumed: bool
) -> Finding:
    """Name random states that differ; operations that differ from there on may have drawn from them."""
    id_ = "determinism.resume_random_state" if resumed else "determinism.random_state"
    evidence = [f"generator {random.key.slot or '(unnamed)'}: {random.reason}"]
    evidence += [f"what was computed differs from here on: {one.key.describe()}" for one in drawn[:1]]
    return Finding(
        id=id_,
        severity=Severity.ERROR,
        confidence=0.95,
        title=_TITLES[id_].format(where=random.key.describe(), name=repetition.name)
        + ("" if drawn else "; nothing that was computed differs by it yet"),
        evidence=tuple(evidence),
        remedy=_REMEDIES[id_],
        where=random.key,
        explains=tuple(one.key for one in drawn),
    )


def _id(key: RecordKey, loaded: int | None) -> str:
    """Return what an origin means: of the state with which a resumed run begins, which state it is."""
    if loaded is None or key.step > loaded:
        return OPERATION
    if key.phase is Phase.BATCH:
        return "determinism.resume_data"
    if key.phase is Phase.INIT:
        return "determinism.resume_weights"
    if key.role is Role.HYPERPARAMETER:
        return f"determinism.resume_{'schedule' if key.slot in _SCHEDULED else 'optimizer'}"
    return "determinism.resume_optimizer" if key.role in _STATES else OPERATION


def _finding(id_: str, origins: list[Origin], repetition: Repetition) -> Finding:
    origin = origins[0]
    key = origin.key
    return Finding(
        id=id_,
        severity=Severity.ERROR,
        confidence=0.95 if origin.inputs else 0.8,
        title=_TITLES[id_].format(where=key.describe(), name=repetition.name),
        evidence=tuple(_evidence(origin, origins, repetition)),
        remedy=_REMEDIES[id_],
        where=key,
        explains=tuple(one.key for one in origins),
    )


_TITLES = {
    "determinism.random_state": "the {name} run has other random states: {where}",
    "determinism.operation": "not repeated: {where} (the {name} run)",
    "determinism.resume_data": "the {name} run reads other samples than the unbroken one: {where}",
    "determinism.resume_optimizer": "the {name} run goes on with another state of the optimizer: {where}",
    "determinism.resume_random_state": "the {name} run goes on with other random states: {where}",
    "determinism.resume_schedule": "the {name} run goes on with another schedule: {where}",
    "determinism.resume_weights": "the {name} run goes on with other parameters: {where}",
}


def _evidence(origin: Origin, origins: list[Origin], repetition: Repetition) -> Iterator[str]:
    comparison = origin.comparison
    plural = "s" if len(origin.ranks) > 1 else ""
    yield f"on rank{plural} {', '.join(map(str, origin.ranks))}: {comparison.reason}"
    if origin.inputs:
        yield f"its inputs: {origin.inputs}"
    if origin.propagated:
        yield f"{origin.propagated} later records differ because of it"
    causes = [f for f in repetition.diagnosis.findings if origin.key in f.explains]
    for cause in causes[:1]:
        yield f"as a divergence this is {cause.id}: {cause.title}"
    rest = list(dict.fromkeys(one.key.fqn or "(model)" for one in origins[1:]))
    if rest:
        more = " …" if len(rest) > _SHOWN else ""
        yield f"likewise {len(origins) - 1} more, of {', '.join(rest[:_SHOWN])}{more}"


def not_loaded(repetition: Repetition, *, expected: int) -> Finding:
    """Return the finding that a resumed run did not begin where the first part ended."""
    return Finding(
        id="determinism.resume_not_loaded",
        severity=Severity.ERROR,
        confidence=1.0,
        title=f"the {repetition.name} run began at step {repetition.began}, and the first part ended before "
        f"step {expected}",
        evidence=("a run that loads no checkpoint begins at step 0",),
        remedy=_REMEDIES["determinism.resume_not_loaded"],
    )
