"""Rules about operations that give another result from the same inputs: forward, loss, backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mindspeed_precision.diagnose.facts import Facts, concerns, describe_factor, reason, scale_of
from mindspeed_precision.diagnose.rules.registry import late_rule, rule
from mindspeed_precision.records import Finding, Origin, Phase, Role, Severity, Verdict


@rule("dgrad.scaled", "loss.gradient_scaled")
def scaled_backward(facts: Facts) -> Iterable[Finding]:
    """Find gradients of activations that are a multiple of the baseline's although what made them agrees."""
    origins = facts.origins_in(Phase.DGRAD, Role.GRAD_OUTPUT, Role.GRAD_INPUT)
    scaled = [(origin, scale) for origin in origins if (scale := scale_of(origin.comparison)) is not None]
    if not scaled:
        return
    first, scale = scaled[0]
    enters = first.key.role is Role.GRAD_OUTPUT and not first.key.fqn
    what = "the gradient of the loss that enters the model" if enters else _gradient(first)
    known = f"{'measured on' if scale.measured else 'from'} {scale.source}"
    factors = sorted({f"{scale.factor:.6g}" for _, scale in scaled})
    yield Finding(
        id="loss.gradient_scaled" if enters else "dgrad.scaled",
        severity=Severity.ERROR,
        confidence=0.95 if scale.measured else 0.7,
        title=f"{what} is {scale.factor:.6g} times the baseline's",
        evidence=(
            f"candidate = {describe_factor(facts, scale.factor)} × baseline, the rest is rounding ({known})",
            *((f"the factors are {', '.join(factors[:4])}",) if len(factors) > 1 else ()),
            first.inputs,
            *concerns([origin for origin, _ in scaled]),
        ),
        remedy="look for a factor: loss scale, 1 / number of microbatches or of tokens, 1 / size of a group, "
        "normalisation over microbatches and ranks"
        if enters
        else "look for a factor in its backward: a reduction that is missing or doubled, a scale",
        where=first.key,
        explains=tuple(origin.key for origin, _ in scaled),
    )


def _gradient(origin: Origin) -> str:
    name = origin.key.fqn or "the model"
    sent = origin.key.role is Role.GRAD_INPUT
    return f"the gradient that {name} sends back" if sent else f"the gradient that reaches {name}"


@rule("fprop.value", "dgrad.value", "fprop.loss")
def values(facts: Facts) -> Iterable[Finding]:
    """Name the operations whose result differs although nothing that they consumed does.

    That is where, and no more than a hint why: the confidence is low, a rule that knows a cause ranks above.
    """
    for id_, origins, what, remedy in (
        (
            "fprop.value",
            facts.origins_in(Phase.FPROP, Role.OUTPUT),
            "the forward pass of {} gives another output from the same inputs and parameters",
            "compare its implementation in both runs: fusion, kernel, dtype, dropout and random state",
        ),
        (
            "dgrad.value",
            [o for o in facts.origins_in(Phase.DGRAD, Role.GRAD_INPUT) if scale_of(o.comparison) is None],
            "the backward pass of {} gives another gradient of its input from the same gradient "
            "of its output",
            "compare its backward implementation: fusion, kernel, dtype, missing or doubled collectives",
        ),
        (
            "fprop.loss",
            facts.origins_in(Phase.LOSS, Role.LOSS),
            "{} differs although the model's outputs and the labels do not",
            "compare the loss function: mask, normalisation, dtype, reduction over microbatches and ranks",
        ),
    ):
        if origins:
            yield _finding(id_, origins, what, remedy)


@late_rule("fprop.value", "dgrad.value")
def between_modules(facts: Facts, findings: Sequence[Finding]) -> Iterable[Finding]:
    """Name what a module receives, where it differs although all before it agrees and no rule says why."""
    explained = {key for finding in findings for key in finding.explains}
    for id_, origins, what, remedy in (
        (
            "fprop.value",
            facts.origins_in(Phase.FPROP, Role.INPUT),
            "what {} receives differs although all that was computed before it agrees: an operation between "
            "modules, or a transfer between pipeline stages, gives another result",
            "compare what computes it: activation function, mask, rotary embedding, what is received",
        ),
        (
            "dgrad.value",
            facts.origins_in(Phase.DGRAD, Role.GRAD_OUTPUT),
            "the gradient that reaches {} differs although all that was computed before it agrees: the "
            "backward of an operation between modules gives another result",
            "compare the backward of what follows it: loss, activation function, residual connection, a "
            "branch that is cut off the graph, what is sent and received",
        ),
    ):
        unnamed = [origin for origin in origins if origin.key not in explained]
        if unnamed:
            yield _finding(id_, unnamed, what, remedy)


def _finding(id_: str, origins: list[Origin], what: str, remedy: str) -> Finding:
    first = origins[0]
    return Finding(
        id=id_,
        severity=Severity.ERROR,
        confidence=0.5,
        title=what.format(first.key.fqn or "the model"),
        evidence=(first.inputs, *reason(first), *concerns(origins)),
        remedy=remedy,
        where=first.key,
        explains=tuple(origin.key for origin in origins),
    )


@rule("layout.kind_differs")
def kinds(facts: Facts) -> Iterable[Finding]:
    """Find records that have another shape or dtype: the runs do not compute the same thing there."""
    origins = [origin for origin in facts.origins if origin.comparison.verdict is Verdict.INCOMPARABLE]
    if origins:
        first = origins[0]
        yield Finding(
            id="layout.kind_differs",
            severity=Severity.ERROR,
            confidence=0.85,
            title=f"{first.key.fqn or '(model)'} {first.key.role.value} has another shape or dtype",
            evidence=(first.comparison.reason, *concerns(origins)),
            remedy="compare the configuration of both runs: dtypes, sequence length, microbatch "
            "size, padding",
            where=first.key,
            explains=tuple(origin.key for origin in origins),
        )
