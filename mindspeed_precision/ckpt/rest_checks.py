"""Findings about what is no tensor: arguments by meaning, iteration, schedule, random states."""

from __future__ import annotations

from mindspeed_precision.ckpt.facts import CKPT, Facts
from mindspeed_precision.ckpt.remainder import Entry
from mindspeed_precision.meanings import Effect, load_meanings
from mindspeed_precision.records import Finding, Severity
from mindspeed_precision.verify.pair.evidence import by_severity, listed, shortened
from mindspeed_precision.verify.registry import Answer


@CKPT.register(
    "config.differs",
    "config.unknown_argument",
    holds="no argument that decides numbers differs",
    unit="arguments",
)
def configuration(facts: Facts) -> Answer:
    """Compare the configurations by meaning."""
    found = facts.configurations
    lines: list[tuple[Severity, str]] = []
    unknown: list[str] = []
    for one in found.apart:
        meaning = load_meanings().argument(one.name)
        if meaning is None:
            unknown.append(one.line(""))
        elif meaning.judged_by == "layout" or (
            meaning.judged_by == "weights" and facts.compared.same_weights
        ):
            lines.append((Severity.INFO, one.line(f"{meaning.reason}; the tensors were compared whole")))
        else:
            severity = (
                Severity.WARNING
                if meaning.effect is Effect.CHANGES and meaning.judged_by
                else meaning.effect.severity
            )
            lines.append((severity, one.line(meaning.reason)))
    harmless = [line.partition(":")[0] for severity, line in lines if severity is Severity.INFO]
    worse = [one for one in lines if one[0] is not Severity.INFO]
    findings = list(
        by_severity("config.differs", "arguments", worse, "make them equal, or know why they are not")
    )
    if harmless:
        findings.append(
            Finding(
                id="config.differs",
                severity=Severity.INFO,
                confidence=0.2,
                title=f"{len(harmless)} different arguments that do not change what is in the tensors",
                evidence=(listed(harmless, 40),),
            )
        )
    if unknown:
        findings.append(
            Finding(
                id="config.unknown_argument",
                severity=Severity.WARNING,
                confidence=0.4,
                title=f"{len(unknown)} different arguments that are not in the table of meanings",
                evidence=shortened(unknown),
                remedy="look up what they do; add them to configs/meanings, with a reason",
            )
        )
    bad = sum(severity is not Severity.INFO for severity, _ in lines) + len(unknown)
    sides = (facts.compared.one.checkpoint, facts.compared.two.checkpoint)
    skipped = "" if found.compared else "the checkpoints share no argument"
    return Answer(
        exercised=found.compared,
        findings=tuple(findings),
        failed=bad,
        skipped=skipped,
        applies=all(side.config for side in sides),
    )


def _entries(
    id_: str, what: str, compared: int, apart: list[Entry], severity: Severity, remedy: str
) -> Answer:
    if not apart:
        return Answer(exercised=compared, applies=compared > 0)
    finding = Finding(
        id=id_,
        severity=severity,
        confidence=0.9,
        title=f"{len(apart)} of {compared} {what} differ",
        evidence=shortened([one.line for one in apart], 12),
        remedy=remedy,
    )
    return Answer(exercised=compared, findings=(finding,), failed=len(apart))


@CKPT.register(
    "schedule.state", holds="both checkpoints were saved at the same point of the schedule", unit="numbers"
)
def schedule(facts: Facts) -> Answer:
    """Compare iteration and schedule."""
    (counts, first), (numbers, second) = facts.remainder.counts, facts.remainder.schedule
    remedy = "compare checkpoints of one iteration; else their weights cannot be the same"
    return _entries(
        "schedule.state",
        "numbers of iteration and schedule",
        counts + numbers,
        first + second,
        Severity.WARNING,
        remedy,
    )


@CKPT.register("optimizer.hyperparameter", holds="the optimizers' numbers are the same", unit="numbers")
def hyperparameters(facts: Facts) -> Answer:
    """Compare the numbers of the parameter groups, and the count of steps."""
    compared, apart = facts.remainder.optimizer
    remedy = "the optimizer's arguments, and what was loaded with --no-load-optim"
    return _entries(
        "optimizer.hyperparameter", "numbers of the optimizer", compared, apart, Severity.WARNING, remedy
    )


@CKPT.register("rng.state", holds="the random states are the same", unit="random states")
def random_states(facts: Facts) -> Answer:
    """Compare the random states of the first rank."""
    compared, apart = facts.remainder.rng
    remedy = "they matter to a training that goes on with dropout: same seed, same iteration"
    return _entries("rng.state", "random states of the first rank", compared, apart, Severity.WARNING, remedy)


@CKPT.register("config.checkpoint", holds="whatever else was saved is the same", unit="values")
def others(facts: Facts) -> Answer:
    """Compare everything else that both checkpoints have."""
    compared, apart = facts.remainder.other
    remedy = "nothing, unless one of them means something to the training"
    return _entries("config.checkpoint", "other values", compared, apart, Severity.INFO, remedy)
