"""How other tokens came about: another order, a shift, padding, another tokenizer, another normalisation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from mindspeed_precision.align.vocabulary import vocabulary_size
from mindspeed_precision.record.elements import to_numbers
from mindspeed_precision.records import Statistics, TensorRecord
from mindspeed_precision.verify.pair.batches import SAMPLE_IDS, BatchPair, Microbatch, Place
from mindspeed_precision.verify.pair_facts import PairFacts

_WIDER = 1.5
"""A largest token id so many times the other's is of another vocabulary: the same text does not make it."""

_NUMERICALLY = 1e-4


class Kind(str, Enum):
    """What became of the content."""

    SHIFTED = "shifted"
    ORDER = "order"
    PADDING = "padding"
    TOKENIZER = "tokenizer"
    NORMALISATION = "normalisation"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class Moved:
    """The content of the candidate is found elsewhere in the baseline.

    Attributes:
        kind: an order, or a shift.
        title: one sentence.
        evidence: facts.
        within_steps: only inside steps: another order of the same sums.
    """

    kind: Kind
    title: str
    evidence: tuple[str, ...]
    within_steps: bool = False


def shifted_tokens(pair: BatchPair, places: Sequence[Place]) -> Moved | None:
    """Say that the tokens of one run are the labels of the other: shifted by one."""
    for one, two, who in (
        (pair.baseline, pair.candidate, "candidate"),
        (pair.candidate, pair.baseline, "baseline"),
    ):
        found = [
            place
            for place in places
            if one[place].fingerprint("labels") == two[place].fingerprint(two[place].content_slot)
        ]
        if found:
            return Moved(
                kind=Kind.SHIFTED,
                title=f"the tokens of the {who} are the other run's labels: shifted by one",
                evidence=(
                    f"{len(found)} of {len(places)} microbatches that differ have the same fingerprint",
                ),
            )
    return None


def moved_batches(pair: BatchPair, places: Sequence[Place]) -> Moved | None:
    """Say where in the baseline the candidate's content is found; None: nowhere."""
    order = list(pair.baseline)
    where: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for position, place in enumerate(order):
        content = pair.baseline[place].content
        if content is not None:
            where.setdefault((content.shape, content.digest.fingerprint), []).append(position)
    offsets: Counter[int] = Counter()
    example = ""
    for place in places:
        content = pair.candidate[place].content
        at = [] if content is None else where.get((content.shape, content.digest.fingerprint), [])
        if at:
            here = order.index(place)
            there = min(at, key=lambda position: abs(position - here))
            offsets[there - here] += 1
            step, _, _, microbatch, _ = order[there]
            example = example or (
                f"step {place[0]}, microbatch {place[3]} of the candidate is step {step}, microbatch "
                f"{microbatch} of the baseline"
            )
    found = sum(offsets.values())
    if found:
        evidence = (f"{found} of {len(places)} microbatches that differ are found elsewhere", example)
        return _order_or_shift(pair, offsets, evidence, all_found=found == len(places))
    return _rows_moved(pair, places)


def _order_or_shift(
    pair: BatchPair, offsets: Counter[int], evidence: tuple[str, ...], *, all_found: bool
) -> Moved:
    (offset, times), total = offsets.most_common(1)[0], sum(offsets.values())
    if len(offsets) == 1 and times > 1:
        ahead = "ahead of" if offset > 0 else "behind"
        title = f"the candidate is {abs(offset)} microbatches {ahead} the baseline"
        return Moved(kind=Kind.SHIFTED, title=title, evidence=evidence)
    within = all_found and all(_same_in_step(pair, step) for step in {place[0] for place in pair.places})
    title = "the batches hold the same samples in another order"
    if within:
        return Moved(
            kind=Kind.ORDER,
            title=f"{title}, within each step: only the order of its sums differs",
            evidence=evidence,
            within_steps=True,
        )
    some = "" if total and all_found else " (of some: the others may be beyond the recorded steps)"
    return Moved(kind=Kind.ORDER, title=title + some, evidence=evidence)


def _same_in_step(pair: BatchPair, step: int) -> bool:
    one, two = (
        Counter(batch.fingerprint(batch.content_slot) for place, batch in side.items() if place[0] == step)
        for side in (pair.baseline, pair.candidate)
    )
    return one == two


def _rows_moved(pair: BatchPair, places: Sequence[Place]) -> Moved | None:
    slot = pair.baseline[places[0]].content_slot
    one, two = pair.sums(slot)
    if one != two:
        return None
    steps = {place[0] for place in pair.places}
    within = all(len(set(pair.sums(slot, step))) == 1 for step in steps)
    return Moved(
        kind=Kind.ORDER,
        title="the batches hold the same samples in another order"
        + (", within each step: only the order of its sums differs" if within else ""),
        evidence=("the sums of unordered fingerprints over all steps agree",),
        within_steps=within,
    )


def kind_of_content(
    facts: PairFacts, pair: BatchPair, places: Sequence[Place]
) -> tuple[Kind, tuple[str, ...]]:
    """Return what kind of other content it is, and the evidence, from elements, statistics and sample ids."""
    place = places[0]
    same_ids = _same_sample_ids(pair, places)
    told = (f"the sample ids of {same_ids} of {len(places)} of these microbatches agree",) if same_ids else ()
    tests: tuple[tuple[Kind, Callable[[], str]], ...] = (
        (Kind.PADDING, lambda: _padding(pair, place)),
        (Kind.NORMALISATION, lambda: _normalisation(pair, place)),
        (Kind.TOKENIZER, lambda: _vocabulary(facts, pair, places)),
    )
    for kind, test in tests:
        evidence = test()
        if evidence:
            return kind, (evidence, *told)
    undecided = (
        ("other padding and another tokenizer were not told apart: record batches at level tensor",)
        if same_ids and pair.baseline[place].elements(pair.baseline[place].content_slot) is None
        else ()
    )
    return Kind.OTHER, (*told, *undecided)


def _same_sample_ids(pair: BatchPair, places: Sequence[Place]) -> int:
    return sum(
        ids is not None and ids == pair.candidate[place].fingerprint(SAMPLE_IDS)
        for place in places
        for ids in (pair.baseline[place].fingerprint(SAMPLE_IDS),)
    )


def _padding(pair: BatchPair, place: Place) -> str:
    """Say that rows differ only where one of the runs repeats one number at their end or their beginning."""
    one, two = (side[place].elements(side[place].content_slot) for side in (pair.baseline, pair.candidate))
    if one is None or two is None or one.bits.shape != two.bits.shape or one.bits.ndim < 1:
        return ""
    left, right = to_numbers(one), to_numbers(two)
    left, right = left.reshape(-1, left.shape[-1]), right.reshape(-1, right.shape[-1])
    apart = left != right
    fillers: set[tuple[float, float]] = set()
    for a, b, row in zip(left, right, apart, strict=True):
        if row.any():
            if len(np.unique(a[row])) > 1 or len(np.unique(b[row])) > 1 or not _at_an_end(row):
                return ""
            fillers.add((float(a[row][0]), float(b[row][0])))
    if len(fillers) != 1:
        return ""
    one_fills, two_fills = next(iter(fillers))
    return f"rows differ only at an end, where the baseline has {one_fills:g} and the candidate {two_fills:g}"


def _at_an_end(row: np.ndarray) -> bool:
    where = np.flatnonzero(row)
    dense = bool(where[-1] - where[0] + 1 == len(where))
    return dense and bool(where[0] == 0 or where[-1] == len(row) - 1) and len(where) < len(row)


def _normalisation(pair: BatchPair, place: Place) -> str:
    """Say that one input is ``a x + b`` of the other, by minimum, maximum, mean and norm."""
    one, two = pair.baseline[place].content, pair.candidate[place].content
    if one is None or two is None or not one.dtype.startswith(("float", "bfloat")):
        return ""
    left, right = one.digest.statistics, two.digest.statistics
    if left is None or right is None or not left.maximum > left.minimum:
        return ""
    a = (right.maximum - right.minimum) / (left.maximum - left.minimum)
    b = right.minimum - a * left.minimum
    if not _explains(left, right, a, b, one):
        return ""
    return f"the candidate's inputs are {a:.6g} times the baseline's plus {b:.6g}, by their moments"


def _explains(left: Statistics, right: Statistics, a: float, b: float, record: TensorRecord) -> bool:
    size = record.numel
    mean = a * left.mean + b
    square = a * a * left.l2_norm**2 + 2 * a * b * size * left.mean + size * b * b
    scale = max(abs(right.maximum), abs(right.minimum))
    return (
        math.isclose(mean, right.mean, rel_tol=_NUMERICALLY, abs_tol=_NUMERICALLY * scale)
        and square >= 0
        and math.isclose(math.sqrt(square), right.l2_norm, rel_tol=_NUMERICALLY)
    )


def _vocabulary(facts: PairFacts, pair: BatchPair, places: Sequence[Place]) -> str:
    sizes = [vocabulary_size(run) for run in (facts.baseline, facts.candidate)]
    tops = [_largest(side, places) for side in (pair.baseline, pair.candidate)]
    if None not in sizes and sizes[0] != sizes[1]:
        return f"vocabularies of {sizes[0]} entries in the baseline and {sizes[1]} in the candidate"
    one, two = tops
    if one is None or two is None or max(one, two) < _WIDER * max(min(one, two), 1.0):
        return ""
    return f"the largest token id is {one:g} in the baseline and {two:g} in the candidate"


def _largest(side: Mapping[Place, Microbatch], places: Sequence[Place]) -> float | None:
    contents = [side[place].content for place in places]
    found = [
        content.digest.statistics.maximum
        for content in contents
        if content is not None
        and content.digest.statistics is not None
        and content.dtype.startswith(("int", "uint"))
    ]
    return max(found, default=None)
