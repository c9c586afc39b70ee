"""What the loss of a microbatch and of a step is made of, as far as a run recorded it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_precision.record.elements import to_numbers
from mindspeed_precision.records import NO_MICROBATCH, Phase, Role, TensorRecord
from mindspeed_precision.verify.run_facts import RunFacts

_MASK = "loss_mask"
_Moment = tuple[int, int]
"""Step and microbatch."""


@dataclass(frozen=True, kw_only=True)
class MicrobatchLoss:
    """The loss of one microbatch on a rank of the last pipeline stage.

    Attributes:
        rank: the rank.
        loss: what the loss function gave to be differentiated: a sum over tokens, or a mean.
        value: its number.
        tokens: how many tokens count, by the loss function's own word, else by the mask; 0: not known.
        summed: the loss function gives the sum and the number of tokens, which the schedule divides by.
        token_sum: the token losses that count, added; None: not known.
        gradient: what the loss gives to each token loss that counts; None: not known, or not one number.
        gradient_record: the record of these gradients.
        microbatches: of the step, on this rank.
        cp_size: of the rank; the schedule multiplies the loss by it.
    """

    rank: int
    loss: TensorRecord
    value: float
    tokens: float
    summed: bool
    token_sum: float | None
    gradient: float | None
    gradient_record: TensorRecord | None
    microbatches: int
    cp_size: int


@dataclass(frozen=True, kw_only=True)
class StepLoss:
    """The loss that is logged of one step, on one rank.

    Attributes:
        rank: the rank.
        record: of the loss.
        value: its number.
        means: what the microbatches give: by token and by microbatch, over all ranks and over this one;
            empty: not known.
    """

    rank: int
    record: TensorRecord
    value: float
    means: tuple[float, ...]


def loss_records(facts: RunFacts) -> Iterator[tuple[int, TensorRecord]]:
    """Yield the records that the losses of microbatches and steps are made of."""
    for rank in facts.ranks:
        losses = facts.of(rank, Phase.LOSS, Role.LOSS)
        if not losses:
            continue
        found = [
            *losses,
            *facts.of(rank, Phase.BATCH, Role.BATCH, slot=_MASK),
            *_of_model(facts.of(rank, Phase.FPROP, Role.OUTPUT, slot="0")),
            *_of_model(facts.of(rank, Phase.DGRAD, Role.GRAD_OUTPUT, slot="0")),
        ]
        yield from ((rank, record) for record in found)


def microbatch_losses(facts: RunFacts) -> list[MicrobatchLoss]:
    """Return the losses of all microbatches whose loss function was seen."""
    return [term for rank in facts.ranks for term in _of_rank(facts, rank)]


def _of_rank(facts: RunFacts, rank: int) -> Iterator[MicrobatchLoss]:
    counts = _by_moment(facts.of(rank, Phase.LOSS, Role.LOSS, slot="1"))
    masks = _by_moment(facts.of(rank, Phase.BATCH, Role.BATCH, slot=_MASK))
    outputs = _by_moment(_of_model(facts.of(rank, Phase.FPROP, Role.OUTPUT, slot="0")))
    arrived = _of_model(facts.of(rank, Phase.DGRAD, Role.GRAD_OUTPUT, slot="0"))
    gradients = {(*_moment(record), record.shape): record for record in arrived}
    held = facts.ranks[rank]
    for moment, loss in _by_moment(facts.of(rank, Phase.LOSS, Role.LOSS, slot="")).items():
        if loss.value is None:
            continue
        output, mask = outputs.get(moment), masks.get(moment)
        # other chunks of the model, which have no name either, have gradients of other shapes
        gradient = None if output is None else gradients.get((*moment, output.shape))
        count = counts.get(moment)
        given = None if count is None else count.value
        tokens = given if given is not None else _sum(mask) if mask is not None else None
        yield MicrobatchLoss(
            rank=rank,
            loss=loss,
            value=loss.value,
            tokens=tokens or 0.0,
            summed=given is not None,
            token_sum=_token_sum(facts, rank, output, mask, given),
            gradient=None if gradient is None else _one_number(gradient),
            gradient_record=gradient,
            microbatches=held.microbatches.get(loss.key.step, 0),
            cp_size=held.coordinates.cp_size,
        )


def _of_model(records: Sequence[TensorRecord]) -> list[TensorRecord]:
    """Return the records of a whole model, which has no name."""
    return [record for record in records if not record.key.fqn and not record.key.recomputed]


def _by_moment(records: Sequence[TensorRecord]) -> Mapping[_Moment, TensorRecord]:
    return {_moment(record): record for record in records if record.key.microbatch != NO_MICROBATCH}


def _moment(record: TensorRecord) -> _Moment:
    return record.key.step, record.key.microbatch


def _sum(record: TensorRecord) -> float | None:
    statistics = record.digest.statistics
    return (
        None if statistics is None or statistics.nans or statistics.infs else statistics.mean * record.numel
    )


def _token_sum(
    facts: RunFacts, rank: int, output: TensorRecord | None, mask: TensorRecord | None, given: float | None
) -> float | None:
    """Return the sum of the token losses under the mask; None where it is not known.

    A loss function that counts other tokens than the mask of the batch has a mask of its own.
    """
    if output is None or mask is None or output.numel != mask.numel:
        return None
    if output.dtype not in ("float32", "float64") or given not in (None, _sum(mask)):
        return None
    statistics = mask.digest.statistics
    if statistics is not None and statistics.minimum == statistics.maximum == 1:
        return _sum(output)
    losses, weights = facts.payload(rank, output), facts.payload(rank, mask)
    if losses is None or weights is None:
        return None
    both = to_numbers(losses).astype(np.float64) * to_numbers(weights).astype(np.float64)
    return float(both.sum())


def _one_number(gradient: TensorRecord) -> float | None:
    """Return the number that every element has that is not zero; None where they differ or are not finite."""
    statistics = gradient.digest.statistics
    count = gradient.numel - statistics.zeros if statistics is not None else 0
    if statistics is None or not count or statistics.nans or statistics.infs:
        return None
    number = max(statistics.maximum, statistics.minimum, key=abs)
    alike = math.isclose(statistics.mean * gradient.numel, number * count, rel_tol=1e-4) and math.isclose(
        statistics.l2_norm, abs(number) * math.sqrt(count), rel_tol=1e-4
    )
    return number if alike else None


def step_losses(facts: RunFacts) -> list[StepLoss]:
    """Return the losses that were logged, each with the means that its microbatches give."""
    terms: dict[int, list[MicrobatchLoss]] = defaultdict(list)
    for term in microbatch_losses(facts):
        terms[term.loss.key.step].append(term)
    found = []
    for rank in facts.ranks:
        logged = [r for r in facts.of(rank, Phase.LOSS, Role.LOSS) if r.key.microbatch == NO_MICROBATCH]
        for record in logged:
            others = [other for other in logged if other.key.step == record.key.step]
            if record.value is None or (len(others) > 1 and record.key.slot != "lm loss"):
                continue
            of_step = _distinct(facts, terms[record.key.step])
            own = [term for term in of_step if term.rank == rank]
            where = facts.ranks[rank].coordinates
            whole = sum(term.microbatches for term in of_step if term.loss.key.microbatch == 0)
            lanes = {(w.dp_rank, w.cp_rank) for t in of_step for w in (facts.ranks[t.rank].coordinates,)}
            complete = len(of_step) == whole and len(lanes) == where.dp_size * where.cp_size
            means = (*_means(of_step), *_means(own)) if complete else ()
            found.append(StepLoss(rank=rank, record=record, value=record.value, means=means))
    return found


def _distinct(facts: RunFacts, terms: Sequence[MicrobatchLoss]) -> list[MicrobatchLoss]:
    """Return the losses of the first rank of each tensor-parallel group: the others have copies."""
    lanes: dict[tuple[int, int, int], MicrobatchLoss] = {}
    for term in terms:
        where = facts.ranks[term.rank].coordinates
        lanes.setdefault((where.dp_rank, where.cp_rank, term.loss.key.microbatch), term)
    return list(lanes.values())


def _means(terms: Sequence[MicrobatchLoss]) -> tuple[float, ...]:
    if not terms:
        return ()
    of_microbatches = [
        term.value / term.tokens if term.summed and term.tokens else term.value for term in terms
    ]
    means = [float(np.mean(of_microbatches))]
    if all(term.tokens for term in terms):
        sums = [value * term.tokens for value, term in zip(of_microbatches, terms, strict=True)]
        means.insert(0, sum(sums) / sum(term.tokens for term in terms))
    return tuple(means)
