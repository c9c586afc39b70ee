"""The gradient norm is that of what is clipped, each parameter counted once; and clipping uses it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from mindspeed_precision.records import Phase, Role, TensorRecord
from mindspeed_precision.verify.clipping import Clipping, clipping_of, distributed, recorded_norms
from mindspeed_precision.verify.elements import is_finite, norm_of, roundoff
from mindspeed_precision.verify.failures import Failure, failure, findings_of
from mindspeed_precision.verify.holders import Held, held, reduced_gradients
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import each_rank, each_replica, whole_run

_NOT_MEGATRON = (
    "the optimizer is not Megatron's: its loop clips before the optimizer is called, and what it "
    "clipped is not recorded"
)
_LARGEST = 1e-4


def allowed(elements: int) -> float:
    """Return the relative error that a norm of ``elements`` numbers summed in float32 may have.

    Sums of n positive numbers are off by more than a few sqrt(n) roundoffs with a vanishing chance only
    (Higham and Mary 2019, theorem 3.1), and kernels that sum in blocks by less. The root halves it.
    """
    return min(_LARGEST, 2.0**-24 * (32 + math.sqrt(elements)) / 2)


@invariant(
    "clip.norm_not_of_gradients",
    holds="the gradient norm is the norm of the reduced gradients, each parameter counted once",
    unit="norms",
    span=[
        each_replica(when=lambda facts: not distributed(facts)),
        whole_run(
            (Phase.REDUCE, Role.REDUCED_GRAD),
            (Phase.CLIP, Role.GRAD_NORM),
            when=distributed,
        ),
    ],
)
def norm_counts_each_parameter_once(facts: RunFacts) -> Answer:
    """Put the norms of the reduced gradients together, without copies, and compare each rank's norm."""
    clipping = clipping_of(facts)
    if clipping is None:
        return Answer(exercised=0, skipped=_NOT_MEGATRON)
    if clipping.limit == 0:
        return Answer(
            exercised=0, applies=False, skipped="gradients are not clipped, and Megatron takes no norm then"
        )
    norms, gradients = recorded_norms(facts), reduced_gradients(facts)
    failures: list[Failure] = []
    exercised, reasons = 0, set()
    for step in sorted({step for step, _ in norms}):
        found, unplaced = held(facts, gradients.get(step, ()))
        reason = _unusable(facts, found, unplaced)
        if reason:
            reasons.add(reason)
            continue
        for rank in sorted(facts.ranks):
            record = norms.get((step, rank))
            if record is None or record.value is None:
                continue
            exercised += 1
            wrong = _wrong_norm(facts, rank, record.value, found, clipping)
            if wrong:
                failures.append(failure(record, rank, *wrong))
    return Answer(
        exercised=exercised,
        findings=findings_of(
            failures,
            id="clip.norm_not_of_gradients",
            title="the gradient norm is not that of the gradients",
            remedy="over which group are squares summed, and which parameters are left out as copies "
            "(tensor-parallel duplicates, shared embeddings)?",
        ),
        failed=len(failures),
        skipped="; ".join(sorted(reasons)) or ("" if exercised else "no gradient norm was recorded"),
    )


def _unusable(facts: RunFacts, found: Sequence[Held], unplaced: set[str]) -> str:
    if unplaced:
        return f"where the shards of {len(unplaced)} parameters sit is not known"
    if facts.missing > 0:
        return "not every rank recorded"
    if not found:
        return "no reduced gradient was recorded"
    if not _complete(facts, found):
        return "not every gradient was recorded"
    if any(one.record.digest.statistics is None for one in found):
        return "no statistics were kept of the reduced gradients (capture.level=statistics)"
    if not all(is_finite(one.record) for one in found):
        return "a gradient is not finite"
    return ""


def _complete(facts: RunFacts, found: Sequence[Held]) -> bool:
    """Tell whether every part of every trainable parameter is there."""
    covered: dict[tuple[object, ...], set[tuple[int, int]]] = defaultdict(set)
    sizes: dict[tuple[object, ...], int] = {}
    for one in found:
        covered[one.place].add(one.range)
        sizes[one.place] = one.placement.local_numel
    names = {one.name for one in found}
    trained = {
        (p.placement.copy_of if p.placement else "") or p.fqn
        for rank in facts.ranks.values()
        for p in rank.parameters
        if p.trainable and not p.tied_to
    }
    whole = all(
        sum(stop - start for start, stop in ranges) == sizes[place] for place, ranges in covered.items()
    )
    return whole and trained <= names


def chosen(rank: int, facts: RunFacts, found: Sequence[Held]) -> list[Held]:
    """Return one holder of each part of each parameter, of those closest to a rank in the layout."""
    where = facts.ranks[rank].coordinates
    best: dict[tuple[object, ...], Held] = {}

    def distance(one: Held) -> tuple[object, ...]:
        same = (one.where.dp_rank, one.where.cp_rank) == (where.dp_rank, where.cp_rank)
        return not same, one.where.tp_rank, one.where.pp_rank, one.rank

    for one in found:
        key = (*one.place, one.range)
        if key not in best or distance(one) < distance(best[key]):
            best[key] = one
    return list(best.values())


def _square(terms: Sequence[Held]) -> float:
    return math.fsum((norm_of(one.record) or 0.0) ** 2 for one in terms)


def _wrong_norm(
    facts: RunFacts, rank: int, norm: float, found: Sequence[Held], clipping: Clipping
) -> tuple[str, str] | None:
    once = chosen(rank, facts, found)
    total = math.sqrt(_square(once))
    tolerance = allowed(sum(one.record.numel for one in once))
    scale = clipping.loss_scale(total / norm if norm else 0.0)
    if abs(norm * scale - total) <= tolerance * max(total, norm * scale):
        return None
    text = f"{norm:.8g}, the gradients have {total / scale:.8g} (rounding: {tolerance:.0e} of it)"
    return text, _explained(facts, rank, norm * scale, found, once, 4 * tolerance)


def _explained(
    facts: RunFacts, rank: int, norm: float, found: Sequence[Held], once: Sequence[Held], tolerance: float
) -> str:
    """Say what was counted how often, where that gives the norm that was used."""
    near = [
        (abs(math.sqrt(max(square, 0.0)) - norm), text)
        for text, square in _countings(facts, rank, found, once)
        if abs(math.sqrt(max(square, 0.0)) - norm) <= tolerance * norm
    ]
    return min(near, default=(0.0, ""))[1]


def _countings(
    facts: RunFacts, rank: int, found: Sequence[Held], once: Sequence[Held]
) -> Iterator[tuple[str, float]]:
    """Yield ways to count wrongly, each with the square of the norm that it gives."""
    where, total = facts.ranks[rank].coordinates, _square(once)
    own = [one for one in found if one.rank == rank]
    yield "it is that of this rank's gradients alone", _square(own)
    if where.tp_rank:
        split = [one for one in own if one.placement.splits]
        yield "it is that of this rank's gradients alone, without tensor-parallel copies", _square(split)
    for what, members in _sets(once, where.tp_size).items():
        square = _square(members)
        if not square:
            continue
        yield f"{what} were left out", total - square
        sizes = {"tensor-parallel": where.tp_size, "data-parallel": where.dp_size, "pipeline": where.pp_size}
        sizes |= {"whole": where.world_size, "expert-parallel": where.ep_size}
        for group, size in sizes.items():
            if size > 1:
                yield f"{what} were counted {size} times (the {group} group)", total + (size - 1) * square
        yield f"{what} were counted twice", total + square


def _sets(once: Sequence[Held], tensor: int) -> Mapping[str, list[Held]]:
    """Return sets of gradients that an error of the bookkeeping would count wrongly, by name."""
    sets: dict[str, list[Held]] = defaultdict(list)
    for one in once:
        sets["all gradients"].append(one)
        if tensor > 1 and not one.placement.splits:
            sets["parameters that every tensor-parallel rank has whole"].append(one)
        if len(one.placement.shape) == 1:
            sets["norms and biases"].append(one)
        if one.expert:
            sets["experts"].append(one)
        if "word_embeddings" in one.name or "output_layer" in one.name:
            sets["the embedding and the output layer"].append(one)
        sets[f"gradients of pipeline stage {one.where.pp_rank}"].append(one)
        sets[f"ranges of data-parallel rank {one.where.dp_rank}"].append(one)
    return sets


@invariant(
    "clip.wrong_factor",
    holds="a clipped gradient is the reduced one times min(1, limit / (norm + 1e-6))",
    unit="gradients",
    span=[each_rank()],
)
def gradients_are_clipped_by_the_norm(facts: RunFacts) -> Answer:
    """Compare norms of gradients before and after clipping, by rank, with the factor of the rank's norm."""
    clipping = clipping_of(facts)
    if clipping is None:
        return Answer(exercised=0, skipped=_NOT_MEGATRON)
    if clipping.limit is None:
        return Answer(
            exercised=0, skipped="the configuration does not say at which norm gradients are clipped"
        )
    norms, failures, exercised = recorded_norms(facts), [], 0
    for rank in facts.ranks:
        before = {(r.key.step, r.key.fqn): r for r in facts.of(rank, Phase.REDUCE, Role.REDUCED_GRAD)}
        scales = _scales(facts, rank, before, norms, clipping)
        for record in facts.of(rank, Phase.CLIP, Role.MAIN_GRAD, slot="clipped"):
            reduced = before.get((record.key.step, record.key.fqn))
            factor = scales.get(record.key.step)
            ratio = _ratio(reduced, record)
            if factor is None or ratio is None:
                continue
            exercised += 1
            tolerance = 8 * (roundoff(record.dtype) + 2.0**-24) + 2.0**-22
            if abs(ratio - factor) > tolerance * factor:
                failures.append(failure(record, rank, *_wrong_factor(ratio, factor, clipping, norms, record)))
    return Answer(
        exercised=exercised,
        findings=findings_of(
            failures,
            id="clip.wrong_factor",
            title="a gradient was not clipped by the norm",
            remedy="is it clipped by another norm than the one that is logged, twice, or not at all? "
            "has it lost or kept a loss scale?",
        ),
        failed=len(failures),
        skipped=""
        if exercised
        else "no gradient was recorded both before and after clipping, with statistics",
    )


def _ratio(before: TensorRecord | None, after: TensorRecord) -> float | None:
    one, two = norm_of(before), norm_of(after)
    if before is None or one is None or two is None or before.numel != after.numel:
        return None
    if (
        not (is_finite(before) and is_finite(after)) or one < 1e-25
    ):  # squares of smaller ones are flushed to zero
        return None
    return two / one


def _scales(
    facts: RunFacts,
    rank: int,
    before: Mapping[tuple[int, str], TensorRecord],
    norms: Mapping[tuple[int, int], TensorRecord],
    clipping: Clipping,
) -> dict[int, float]:
    """Return by step what clipping, and unscaling, multiply each gradient of a rank by."""
    factors: dict[int, float] = {}
    ratios: dict[int, list[float]] = defaultdict(list)
    for record in facts.of(rank, Phase.CLIP, Role.MAIN_GRAD, slot="clipped"):
        ratio = _ratio(before.get((record.key.step, record.key.fqn)), record)
        if ratio:
            ratios[record.key.step].append(ratio)
    for step, known in ratios.items():
        norm = norms.get((step, rank))
        if clipping.limit and (norm is None or norm.value is None):
            continue
        size = norm.value if norm is not None and norm.value is not None else 0.0
        factor = min(1.0, clipping.limit / (size + 1e-6)) if clipping.limit else 1.0
        usual = sorted(known)[len(known) // 2]
        factors[step] = factor / clipping.loss_scale(factor / usual)
    return factors


def _wrong_factor(
    ratio: float,
    factor: float,
    clipping: Clipping,
    norms: Mapping[tuple[int, int], TensorRecord],
    record: TensorRecord,
) -> tuple[str, str]:
    text = f"multiplied by {ratio:.8g}, not {factor:.8g}"
    if abs(ratio - 1) < 1e-6:
        return text, "it was not clipped"
    if abs(ratio - factor**2) < 1e-6 * factor:
        return text, "it was clipped twice"
    others = [norm.value for (step, _), norm in norms.items() if step == record.key.step and norm.value]
    limit = clipping.limit or 0.0
    if any(abs(ratio - min(1.0, limit / (norm + 1e-6))) < 1e-6 * ratio for norm in others):
        return text, "it was clipped by another rank's norm"
    implied = limit / ratio if ratio else 0.0
    return text, f"that is a norm of {implied:.6g}" if limit and ratio < 1 else ""
