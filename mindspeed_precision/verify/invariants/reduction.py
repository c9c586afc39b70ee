"""The reduced gradient is the sum, or the mean, of what the ranks had accumulated."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from mindspeed_precision.record.placement import EMBEDDING_GROUP, TENSOR_GROUP
from mindspeed_precision.records import Phase, Role, TensorRecord
from mindspeed_precision.verify.elements import Vector, moments_of, numbers, roundoff, sketch_of
from mindspeed_precision.verify.failures import Failure, failure, findings_of
from mindspeed_precision.verify.holders import (
    Held,
    held,
    local_gradients,
    reduced_gradients,
    summed_gradients,
    terms_of,
)
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import each_stage

_SAMPLED = 1.22
"""A sketch of an error is at most so much longer than the error, but for a chance of 1e-6 (ADR 6)."""

_MOMENTS = 2.0**-18
"""Relative error of a mean and a norm that a device summed in float32."""

_ELEMENTS, _SKETCHES, _MEANS = "elements", "sketches", "means"


@dataclass(frozen=True, kw_only=True)
class _Sum:
    """A reduced gradient beside what must have been added up to it, both in one linear form.

    Attributes:
        result: the reduced gradient, or a rank's range of it.
        terms: what the ranks had.
        values: ``[terms, n]``, elements, sketches or means of the terms.
        reduced: ``[n]``, the same of the reduced gradient.
        error: ``[n]``, or one number for the norm of all, that rounding may leave for a factor of 1.
        way: which form it is.
    """

    result: Held
    terms: Sequence[Held]
    values: Vector
    reduced: Vector
    error: Vector
    way: str

    def fits(self, weights: Vector) -> bool:
        """Tell whether the reduced gradient is the sum of the terms with these weights, to rounding."""
        size = float(np.abs(weights).max())
        off = self.reduced - weights @ self.values
        if self.way == _SKETCHES:
            return bool(np.linalg.norm(off) <= max(size, 1e-300) * self.error[0] + self.error[1])
        return bool((np.abs(off) <= max(size, 1e-300) * self.error + 2.0**-126).all())

    @property
    def factor(self) -> float:
        """The factor that brings the sum closest to the reduced gradient; NaN where the sum is zero."""
        total = self.values.sum(axis=0)
        square = float(total @ total)
        return float(total @ self.reduced) / square if square else float("nan")


@invariant(
    "reduce.not_the_sum",
    holds="a reduced gradient is the sum of what the ranks had, times one factor for all parameters",
    unit="reduced gradients",
    span=[
        each_stage(
            (Phase.REDUCE, Role.REDUCED_GRAD), (Phase.ACCUMULATE, Role.MAIN_GRAD), keep=summed_gradients
        )
    ],
)
def reduction_is_a_sum(facts: RunFacts) -> Answer:
    """Add up what the ranks had before the reduction: elements, or their sketches, or means."""
    sums, left = _sums(facts)
    expected, source = _expected_factor(facts)
    failures: list[Failure] = []
    for step in sorted({one.result.record.key.step for one in sums}):
        of_step = [one for one in sums if one.result.record.key.step == step]
        factor = _usual(of_step) if expected is None else expected
        failures += [wrong for one in of_step if (wrong := _wrong(one, factor))]
    ways = Counter(one.way for one in sums)
    skipped = [f"{count} gradients: {reason}" for reason, count in left.items()]
    skipped += [f"{ways[way]} by {way} alone" for way in (_SKETCHES, _MEANS) if ways[way]]
    return Answer(
        exercised=len(sums),
        findings=findings_of(
            failures,
            id="reduce.not_the_sum",
            title="a reduced gradient is not the sum of what the ranks had",
            remedy="which group reduces it, with which operation and factor? an all-reduce that was "
            "skipped, not waited for, made twice, or made without the scaling that goes with it",
            notes=(f"factor: {source}",),
        ),
        failed=len(failures),
        skipped="; ".join(skipped)
        or ("" if sums else "no gradient was recorded both before and after its reduction"),
    )


def _expected_factor(facts: RunFacts) -> tuple[float | None, str]:
    """Return the factor that the configuration asks for, or None where records must tell; and which it is."""
    where = next(iter(facts.ranks.values())).coordinates
    ranks = where.dp_size * where.cp_size
    if not facts.config.get("ddp_config"):
        return None, "inferred from the records, as the most usual one: no configuration of a DDP is known"
    if facts.config.get("transformer_config", {}).get("calculate_per_token_loss"):
        return None, "inferred from the records, as the most usual one: 1 / tokens (calculate_per_token_loss)"
    return (
        1 / ranks,
        f"1 / {ranks}, the mean over data- and context-parallel ranks, as Megatron's DDP is configured",
    )


def _usual(sums: Sequence[_Sum]) -> float:
    known = [one.factor for one in sums if np.isfinite(one.factor)]
    return median(known) if known else 1.0


def _wrong(one: _Sum, factor: float) -> Failure | None:
    ones = np.ones(len(one.terms))
    allowed = [factor]
    if one.result.placement.partial == TENSOR_GROUP:  # norms of heads may be averaged over it
        allowed.append(factor / one.result.where.tp_size)
    if any(one.fits(value * ones) for value in allowed) or not np.isfinite(one.reduced).all():
        return None
    kind = _explained(one, factor)
    ranks = ", ".join(str(term.rank) for term in one.terms)
    found = f"not {factor:.6g} times the sum of ranks {ranks}, by {one.way}; best factor {one.factor:.6g}"
    return failure(one.result.record, one.result.rank, found, kind)


def _explained(one: _Sum, factor: float) -> str:
    """Name which terms with which factor make the reduced gradient, where some do."""
    where, partial = one.result.where, one.result.placement.partial
    every = np.ones(len(one.terms))
    own = np.array([term.rank == one.result.rank for term in one.terms], float)
    stage = np.array([term.where.pp_rank == where.pp_rank for term in one.terms], float)
    tensor = np.array([term.where.tp_rank == where.tp_rank for term in one.terms], float)
    known = one.factor
    wrong: list[tuple[str, Vector]] = []
    if np.isfinite(known) and known:
        summed = abs(known - 1) < 1e-3 < abs(factor - 1)
        text = (
            f"it is {known / factor:.4g} times what it should be{': the sum, not the mean' if summed else ''}"
        )
        wrong.append((text, known * every))
    if partial == EMBEDDING_GROUP:
        wrong.append(("it lacks the stage that shares the embedding", factor * stage))
    if partial == TENSOR_GROUP:
        wrong.append(("it lacks the other ranks of the tensor-parallel group", factor * tensor))
    wrong += [("it was not reduced: it is this rank's own, scaled", factor * own)]
    wrong += [("it was not reduced: it is this rank's own", own)]
    return next((text for text, weights in wrong if weights.any() and one.fits(weights)), "")


def _sums(facts: RunFacts) -> tuple[list[_Sum], Counter[str]]:
    """Return every reduced gradient beside its terms, one of each kind of copies; and what was left, why."""
    left: Counter[str] = Counter()
    sums: list[_Sum] = []
    after, before = reduced_gradients(facts), local_gradients(facts)
    for step, records in after.items():
        results, unplaced = held(facts, records)
        local, _ = held(facts, before.get(step, ()))
        left["where its shards sit is not known"] += len(unplaced)
        by_place: dict[tuple[object, ...], list[Held]] = defaultdict(list)
        for one in local:
            by_place[one.place].append(one)
        for result in _distinct(results):
            terms, reason = terms_of(result, by_place.get(result.place, ()))
            found = None if reason or not terms else _linear(facts, result, terms, results)
            if found is None:
                left[reason or ("no elements, sketches or statistics" if terms else "nothing before it")] += 1
            else:
                sums.append(found)
    return sums, +left


def _distinct(results: Sequence[Held]) -> list[Held]:
    """Return one of each set of copies with equal bits; ranges of a distributed optimizer are each one."""
    found: dict[tuple[object, ...], Held] = {}
    for one in results:
        copies = one.place, one.range, one.record.digest.fingerprint, one.where.tp_rank
        found.setdefault(copies, one)
    return list(found.values())


def _linear(facts: RunFacts, result: Held, terms: Sequence[Held], results: Sequence[Held]) -> _Sum | None:
    """Return a reduced gradient and its terms in the sharpest form that was kept of all of them."""
    return (
        _of_elements(facts, result, terms) or _of_sketches(result, terms, results) or _of_means(result, terms)
    )


def _of_elements(facts: RunFacts, result: Held, terms: Sequence[Held]) -> _Sum | None:
    records = [(result.rank, result.record), *((term.rank, term.record) for term in terms)]
    if not all(record.payload for _, record in records):
        return None
    reduced, *found = [numbers(facts, rank, record) for rank, record in records]
    assert reduced is not None
    start, stop = result.range
    flat = [values.reshape(-1)[start:stop] for values in found if values is not None]
    values = np.array(flat)
    error = (len(terms) + 4) * roundoff(result.record.dtype) * np.abs(values).sum(axis=0)
    return _Sum(
        result=result, terms=terms, values=values, reduced=reduced.reshape(-1), error=error, way=_ELEMENTS
    )


def _of_sketches(result: Held, terms: Sequence[Held], results: Sequence[Held]) -> _Sum | None:
    ranges = _ranges(result, results)
    after = [sketch_of(one.record) for one in ranges]
    before = [sketch_of(term.record) for term in terms]
    known = [found for found in before if found is not None]
    made = [found for found in after if found is not None]
    if not ranges or len(known) < len(before) or len(made) < len(after):
        return None
    values = np.array([found for found, _ in known])
    sizes = float(np.linalg.norm(values, axis=1).sum())
    rounding = _SAMPLED * (len(terms) + 4) * roundoff(result.record.dtype) * sizes
    error = np.array([rounding + sum(error for _, error in known), sum(error for _, error in made)])
    reduced = np.sum([found for found, _ in made], axis=0)
    return _Sum(result=result, terms=terms, values=values, reduced=reduced, error=error, way=_SKETCHES)


def _ranges(result: Held, results: Sequence[Held]) -> list[Held]:
    """Return the ranges that make up a whole gradient, or itself; nothing where some are missing."""
    size = result.placement.local_numel
    if result.range == (0, size):
        return [result]
    by_range: Mapping[tuple[int, int], Held] = {
        one.range: one
        for one in results
        if one.place == result.place
        and (result.placement.splits or one.where.tp_rank == result.where.tp_rank)
    }
    covered = sum(stop - start for start, stop in by_range)
    return list(by_range.values()) if covered == size else []


def _of_means(result: Held, terms: Sequence[Held]) -> _Sum | None:
    if result.range != (0, result.placement.local_numel):
        return None
    records: list[TensorRecord] = [result.record, *(term.record for term in terms)]
    moments = [found for record in records if (found := moments_of(record)) is not None]
    if len(moments) < len(records):
        return None
    (reduced, _), *before = moments
    sizes = sum(size for _, size in before)
    error = np.array([(_MOMENTS + (len(terms) + 4) * roundoff(result.record.dtype)) * sizes])
    values = np.array([[mean] for mean, _ in before])
    return _Sum(
        result=result, terms=terms, values=values, reduced=np.array([reduced]), error=error, way=_MEANS
    )
