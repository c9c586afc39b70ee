"""Data: which of the ways in which two runs may see other batches is it."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_precision.records import Finding, Severity, Side
from mindspeed_precision.verify.pair.batches import BatchPair, Place, batch_pair, key_of
from mindspeed_precision.verify.pair.evidence import listed
from mindspeed_precision.verify.pair.registry import pair_check
from mindspeed_precision.verify.pair.samples import Kind, kind_of_content, moved_batches, shifted_tokens
from mindspeed_precision.verify.pair_facts import PairFacts
from mindspeed_precision.verify.registry import Answer

_IDS = {
    Kind.SHIFTED: "data.shifted",
    Kind.ORDER: "data.batch_order",
    Kind.PADDING: "data.other_padding",
    Kind.TOKENIZER: "data.other_tokenizer",
    Kind.NORMALISATION: "data.other_normalisation",
    Kind.OTHER: "data.batch_differs",
}
_TITLES = {
    Kind.PADDING: "the same samples are padded otherwise",
    Kind.TOKENIZER: "the batches hold tokens of another vocabulary",
    Kind.NORMALISATION: "the same inputs are normalised otherwise",
    Kind.OTHER: "the batches hold other data",
}
_REMEDIES = {
    Kind.SHIFTED: "look for what skips or repeats a sample, or shifts labels against tokens twice or never",
    Kind.ORDER: "use the same shuffle seed, sampler and number of consumed samples",
    Kind.PADDING: "use the same padding id, side and length",
    Kind.TOKENIZER: "use the same tokenizer and vocabulary",
    Kind.NORMALISATION: "use the same mean, deviation and range of the inputs",
    Kind.OTHER: "use the same data files, index cache, seed, split and number of consumed samples",
}


@pair_check(
    "data.batch_differs",
    "data.batch_order",
    "data.shifted",
    "data.other_padding",
    "data.other_tokenizer",
    "data.other_normalisation",
    "data.other_mask",
    holds="the batches of the recorded steps hold the same samples, in the same order, read in the same way",
    unit="microbatches",
)
def data(facts: PairFacts) -> Answer:
    """Compare the batches of every common step."""
    pair = batch_pair(facts)
    empty = [side.value for side, found in _sides(pair) if not found]
    if empty:
        why = (
            "no step is whole in both runs" if not facts.steps else f"no batch of the {empty[0]} was recorded"
        )
        return Answer(exercised=0, skipped=why)
    if not pair.alike:
        return _by_step(facts, pair)
    differing = pair.differing()
    content = [place for place, slots in differing.items() if pair.baseline[place].content_slot in slots]
    findings: list[Finding] = []
    if content:
        findings.append(_content(facts, pair, content))
    rest = {place: slots for place, slots in differing.items() if place not in set(content)}
    if rest:
        findings.append(_reading(pair, rest))
    return Answer(exercised=len(pair.places), findings=tuple(findings), failed=len(differing))


def _sides(pair: BatchPair) -> list[tuple[Side, object]]:
    return [(Side.BASELINE, pair.baseline), (Side.CANDIDATE, pair.candidate)]


def _content(facts: PairFacts, pair: BatchPair, places: Sequence[Place]) -> Finding:
    """Tell what kind of other content it is: first what shows in the bits, then what only numbers hint at."""
    shifted = shifted_tokens(pair, places)
    moved = moved_batches(pair, places)
    for kind, found in ((Kind.SHIFTED, shifted), (moved.kind if moved else Kind.ORDER, moved)):
        if found is not None:
            within = kind is Kind.ORDER and found.within_steps
            return _finding(
                pair,
                places,
                id_=_IDS[kind],
                title=found.title,
                evidence=found.evidence,
                remedy=_REMEDIES[kind],
                severity=Severity.WARNING if within else Severity.ERROR,
            )
    kind, evidence = kind_of_content(facts, pair, places)
    return _finding(
        pair, places, id_=_IDS[kind], title=_TITLES[kind], evidence=evidence, remedy=_REMEDIES[kind]
    )


def _reading(pair: BatchPair, differing: dict[Place, list[str]]) -> Finding:
    """Say that the same samples are read otherwise: mask, positions, labels."""
    slots = list(dict.fromkeys(slot for found in differing.values() for slot in found))
    place = next(iter(differing))
    unshifted = [
        side.value
        for side, batches in ((Side.BASELINE, pair.baseline), (Side.CANDIDATE, pair.candidate))
        if (batch := batches[place]).fingerprint("labels") == batch.fingerprint(batch.content_slot)
    ]
    if "labels" in slots and len(unshifted) == 1:
        return _finding(
            pair,
            list(differing),
            id_="data.shifted",
            title=f"the labels of the {unshifted[0]} are its tokens, the other run shifts them by one",
            evidence=("labels and tokens have the same fingerprint",),
            remedy=_REMEDIES[Kind.SHIFTED],
        )
    return _finding(
        pair,
        list(differing),
        id_="data.other_mask",
        title=f"the same samples have another {listed(slots)}",
        evidence=(f"slots: {listed(slots)}",),
        remedy="use the same options for masks and positions (--eod-mask-loss, --reset-position-ids, "
        "--reset-attention-mask), and the same padding",
    )


def _finding(
    pair: BatchPair,
    places: Sequence[Place],
    *,
    id_: str,
    title: str,
    evidence: Sequence[str],
    remedy: str,
    severity: Severity = Severity.ERROR,
) -> Finding:
    first = places[0]
    steps = {place[0] for place in places}
    every = {place[0] for place in pair.places}
    ranks = sorted({place[1] for place in places})
    return Finding(
        id=id_,
        severity=severity,
        confidence=0.95,
        title=title,
        evidence=(
            *evidence,
            f"first: step {first[0]}, microbatch {first[3]}, data-parallel rank {first[1]}",
            f"{len(places)} of {len(pair.places)} microbatches in {len(steps)} of {len(every)} steps, "
            f"data-parallel ranks {listed([str(rank) for rank in ranks])}",
        ),
        remedy=remedy,
        where=key_of(first, pair.baseline[first].content_slot),
    )


def _by_step(facts: PairFacts, pair: BatchPair) -> Answer:
    """Compare whole steps: the runs cut them into other microbatches, or spread them over other ranks."""
    slot = next(iter(pair.baseline.values())).content_slot
    if not slot:
        return Answer(
            exercised=0, skipped="the runs cut steps differently, and no slot is known to hold tokens"
        )
    apart = [step for step in facts.steps if len(set(pair.sums(slot, step))) > 1]
    if not apart:
        return Answer(exercised=len(facts.steps), skipped="only whole steps: the runs cut them differently")
    one, two = pair.sums(slot)
    kind = Kind.ORDER if one == two else Kind.OTHER
    place = next(place for place in pair.baseline if place[0] == apart[0])
    title = "the steps hold the same tokens in another order" if one == two else "the steps hold other data"
    return Answer(
        exercised=len(facts.steps),
        failed=len(apart),
        findings=(
            Finding(
                id=_IDS[kind],
                severity=Severity.ERROR,
                confidence=0.8,
                title=title,
                evidence=(
                    f"first: step {apart[0]}; {len(apart)} of {len(facts.steps)} steps differ",
                    "the runs cut a step into other microbatches, so that whole steps are compared",
                    f"elements of step {apart[0]}: {pair.size(slot, apart[0])[0]} in the baseline, "
                    f"{pair.size(slot, apart[0])[1]} in the candidate",
                ),
                remedy=_REMEDIES[kind],
                where=key_of(place, slot),
            ),
        ),
    )
