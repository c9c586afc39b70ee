"""The loss: what the token losses and the normaliser give, over microbatches and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mindspeed_precision.records import Finding, Severity
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.loss_terms import MicrobatchLoss, loss_records, microbatch_losses, step_losses
from mindspeed_precision.verify.places import Found, in_execution_order, seen_first
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import each_rank, whole_run

UNEVEN = 1.05
"""How many times as many tokens one microbatch must have as another before it is worth a word."""

_STEP_TOLERANCE = 1e-4


@invariant(
    "loss.not_of_token_losses",
    holds="the loss of a microbatch is the sum, or the mean, of its token losses under the loss mask",
    unit="microbatches",
    span=[each_rank()],
)
def of_token_losses(facts: RunFacts) -> Answer:
    """Compare what the loss function gave with the token losses that the model gave."""
    terms = microbatch_losses(facts)
    known = [term for term in terms if term.token_sum is not None and term.tokens]
    found = [
        Found(rank=term.rank, record=term.loss, number=ratio, text=_off_sum(term, ratio))
        for term in known
        if (ratio := _off_token_losses(term)) is not None
    ]
    skipped = _why_not(terms, "token losses and a loss mask that counts every token, or elements of both")
    answer = _answer(facts, found, known, skipped, "loss.not_of_token_losses", _SUM_TITLE, _SUM_REMEDY)
    if all(term.summed for term in known):
        return answer
    # without the number of tokens it is not known that the mask of the batch is the one that counts
    unsure = [replace(one, severity=Severity.WARNING, confidence=0.5) for one in answer.findings]
    return replace(answer, findings=tuple(unsure))


_SUM_TITLE = "the loss of a microbatch is not what its token losses give"
_SUM_REMEDY = (
    "look at the loss function: its mask, its sum, what it divides by, and what is added to the loss"
)


def _off_token_losses(term: MicrobatchLoss) -> float | None:
    """Return the ratio of the loss to the mean of the token losses; None where it is their sum or mean."""
    assert term.token_sum is not None
    value = term.value
    if not math.isfinite(value) or not math.isfinite(term.token_sum):
        return None  # `nonfinite.first` says where
    tolerance = 1e-5 + min(term.tokens * 2.0**-24, 1e-3)
    forms = [
        scale * term.token_sum for scale in (1, 1 / term.tokens, term.cp_size, term.cp_size / term.tokens)
    ]
    if any(math.isclose(value, form, rel_tol=tolerance, abs_tol=1e-30) for form in forms):
        return None
    mean = term.token_sum / term.tokens
    return value / mean if mean else math.inf


def _off_sum(term: MicrobatchLoss, ratio: float) -> str:
    assert term.token_sum is not None
    return (
        f"loss {term.value:.6g}; token losses sum up to {term.token_sum:.6g} over {term.tokens:g} tokens: "
        f"{ratio:.6g} times their mean"
    )


@invariant(
    "loss.gradient_scaled",
    holds="each token loss gets the gradient 1 / (tokens x microbatches), or 1, times the loss scale",
    unit="microbatches",
    span=[each_rank()],
)
def gradient_scaled(facts: RunFacts) -> Answer:
    """Compare the gradient that enters the model with the normaliser."""
    terms = microbatch_losses(facts)
    known = [term for term in terms if term.gradient is not None and term.tokens]
    found = [
        Found(rank=term.rank, record=term.gradient_record, number=factor, text=_off_factor(term, factor))
        for term in known
        if term.gradient_record is not None and (factor := _off_normaliser(facts, term)) is not None
    ]
    skipped = _why_not(terms, "a gradient that is the same for every token")
    return _answer(facts, found, known, skipped, "loss.gradient_scaled", _FACTOR_TITLE, _FACTOR_REMEDY)


_FACTOR_TITLE = "the gradient that enters the model is not that of a mean over tokens and microbatches"
_FACTOR_REMEDY = (
    "look between the loss and the backward pass: the loss must be divided by its tokens and by the number "
    "of microbatches once (forward_step_calc_loss, calculate_per_token_loss, what the loss function returns)"
)


def _off_normaliser(facts: RunFacts, term: MicrobatchLoss) -> float | None:
    """Return by what the gradient of a token loss is too large; None where it is as it must be."""
    assert term.gradient is not None
    per_microbatch = term.gradient * term.tokens * term.microbatches
    step = term.loss.key.step
    for factor in (
        per_microbatch,
        per_microbatch / term.cp_size,
        term.gradient,
        term.gradient / term.cp_size,
    ):
        if any(math.isclose(factor, scale, rel_tol=1e-3) for scale in _loss_scales(facts, factor, step)):
            return None
    return per_microbatch


def _loss_scales(facts: RunFacts, factor: float, step: int) -> Iterator[float]:
    """Yield the loss scales that may have been at work in a step: the nearest to a factor, of fp16.

    Megatron's dynamic scale begins at ``initial_loss_scale`` where nothing was loaded. It is halved at most
    once in a step, and doubled after ``loss_scale_window`` steps (``DynamicGradScaler``). Where its beginning
    is not known any power of two that is at least 1 may be it.
    """
    config = facts.config.get("optimizer_config", {})
    static = config.get("loss_scale")
    begun = _begins_with(facts)
    if facts.half and not static and begun is not None:
        initial, window = begun
        turns = round(math.log2(factor / initial)) if factor > 0 else -step - 1
        if -step <= turns <= math.ceil(step / window):
            yield initial * 2.0**turns
        return
    yield 1.0
    if isinstance(static, (int, float)):
        yield float(static)
    if facts.half and factor >= 1:
        yield 2.0 ** round(math.log2(factor))


def _begins_with(facts: RunFacts) -> tuple[float, int] | None:
    """Return the dynamic loss scale that a training began with, and its window; None: not known."""
    config = facts.config.get("optimizer_config", {})
    initial, window = config.get("initial_loss_scale"), config.get("loss_scale_window")
    if not isinstance(initial, (int, float)) or not isinstance(window, (int, float)):
        return None
    fresh = facts.run.manifest.get("first_step") == 0
    return (float(initial), int(window)) if fresh and initial > 0 and window >= 1 else None


def _off_factor(term: MicrobatchLoss, factor: float) -> str:
    return (
        f"gradient {term.gradient:.6g} per token loss, {term.tokens:g} tokens, {term.microbatches} "
        f"microbatches: {factor:.6g} times 1 / (tokens x microbatches)"
    )


@invariant(
    "loss.microbatches_weighted_unequally",
    holds="a token of one microbatch weighs as much as one of another, in one step",
    unit="steps",
    span=[whole_run(keep=loss_records)],
)
def weighted_alike(facts: RunFacts) -> Answer:
    """Find steps in which each microbatch is a mean of its own, over other numbers of tokens."""
    steps: dict[int, list[MicrobatchLoss]] = {}
    for term in microbatch_losses(facts):
        if term.gradient is not None and term.tokens:
            steps.setdefault(term.loss.key.step, []).append(term)
    known = {step: terms for step, terms in steps.items() if len(terms) > 1}
    found = [one for terms in known.values() if (one := _unequal(facts, terms)) is not None]
    skipped = "" if known else "no step has two microbatches with tokens and gradients of token losses"
    if not found:
        return Answer(exercised=len(known), skipped=skipped)
    first = in_execution_order(facts, found)[0]
    finding = Finding(
        id="loss.microbatches_weighted_unequally",
        severity=Severity.WARNING,
        confidence=0.9,
        title="each microbatch is a mean over its own tokens: a token of a short one weighs more",
        evidence=(first.text, f"{len(found)} of {len(known)} steps"),
        remedy="divide by the tokens of the whole step: calculate_per_token_loss=true "
        "(--calculate-per-token-loss)",
        where=first.record.key,
    )
    return Answer(exercised=len(known), failed=len(found), findings=(finding,), skipped=skipped)


def _unequal(facts: RunFacts, terms: Sequence[MicrobatchLoss]) -> Found | None:
    most, least = max(terms, key=lambda t: t.tokens), min(terms, key=lambda t: t.tokens)
    assert most.gradient is not None
    assert least.gradient is not None
    if most.tokens < UNEVEN * least.tokens or not most.gradient:
        return None
    expected, seen = most.tokens / least.tokens, least.gradient / most.gradient
    if not math.isclose(expected, seen, rel_tol=1e-3):
        return None
    places = [
        Found(rank=term.rank, record=term.gradient_record)
        for term in terms
        if term.gradient_record is not None
    ]
    first = in_execution_order(facts, places)[0]
    text = (
        f"microbatches of {least.tokens:g} to {most.tokens:g} tokens: a token weighs up to {seen:.4g} "
        "times as much as another"
    )
    return Found(rank=first.rank, record=first.record, text=text)


@invariant(
    "loss.step_not_the_mean",
    holds="the loss of a step is the mean of those of its microbatches, by token or by microbatch",
    unit="steps",
    span=[whole_run(keep=loss_records)],
)
def step_is_the_mean(facts: RunFacts) -> Answer:
    """Compare the loss that is logged with those that the loss function gave."""
    known = [step for step in step_losses(facts) if step.means]
    found = [
        Found(rank=step.rank, record=step.record, text=text)
        for step in known
        if math.isfinite(step.value)
        and not any(math.isclose(step.value, mean, rel_tol=_STEP_TOLERANCE) for mean in step.means)
        and (text := f"logged {step.value:.8g}; the microbatches give {step.means[0]:.8g}")
    ]
    skipped = "" if known else "no step has a logged loss and the losses of all its microbatches"
    return _answer(facts, found, known, skipped, "loss.step_not_the_mean", _STEP_TITLE, _STEP_REMEDY)


_STEP_TITLE = "the loss of a step is not the mean of its microbatches"
_STEP_REMEDY = (
    "look at what is logged: the sum over microbatches and data-parallel ranks, and what it is divided by"
)


def _why_not(terms: Sequence[MicrobatchLoss], needed: str) -> str:
    return f"no microbatch has {needed}" if terms else "no loss function's result was recorded"


def _answer(
    facts: RunFacts,
    found: Sequence[Found],
    known: Sequence[object],
    skipped: str,
    id_: str,
    title: str,
    remedy: str,
) -> Answer:
    if not found:
        return Answer(exercised=len(known), skipped="" if known else skipped)
    first = in_execution_order(facts, found)[0]
    finding = Finding(
        id=id_,
        severity=Severity.ERROR,
        confidence=0.95,
        title=title,
        evidence=(
            f"rank {first.rank}, {first.record.key.describe()}: {first.text}",
            f"{len(found)} of {len(known)}",
        ),
        remedy=remedy,
        where=first.record.key,
    )
    return Answer(
        exercised=len(known),
        failed=len(found),
        findings=(seen_first(first, facts, finding, count=len(found)),),
    )
