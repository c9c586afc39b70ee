"""Ranks that draw different random numbers go on doing so: states and dropout masks that become equal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise

from mindspeed_precision.records import Finding, Phase, Role, Severity, TensorRecord
from mindspeed_precision.verify.elements import numbers
from mindspeed_precision.verify.invariants.randomness import call_of, is_dropout, states_of
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.places import Found, in_execution_order
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import whole_run


def _drawn(facts: RunFacts) -> Iterator[tuple[int, TensorRecord]]:
    """Yield states of generators, and what dropout was given and gave, where elements were kept."""
    yield from facts.everywhere(Phase.BATCH, Role.RNG)
    for role in (Role.INPUT, Role.OUTPUT):
        for rank, record in facts.everywhere(Phase.FPROP, role):
            if record.payload is not None and record.key.slot == "0" and is_dropout(record):
                yield rank, record


@invariant(
    "rng.became_equal",
    holds="generators that stand at different states on two ranks do not come to stand at one",
    unit="generators x steps",
    span=[whole_run(keep=_drawn)],
)
def stay_apart(facts: RunFacts) -> Answer:
    """Find ranks whose generators differed when a step began, and are equal when the next one does."""
    by_step: dict[str, dict[int, dict[int, TensorRecord]]] = defaultdict(lambda: defaultdict(dict))
    for (rank, slot), records in states_of(facts).items():
        if slot not in _HOSTS:
            for record in records:
                by_step[slot][record.key.step][rank] = record
    looked, found = 0, []
    for slot, steps in by_step.items():
        for before, after in pairwise(sorted(steps)):
            if after != before + 1:
                continue
            looked += 1
            ranks = _met(steps[before], steps[after])
            if ranks:
                text = f"{slot} differed on ranks {', '.join(map(str, ranks))} when step {before} began"
                found.append(Found(rank=ranks[0], record=steps[after][ranks[0]], text=text))
    if len(facts.coordinates) == 1:
        return Answer(exercised=0, applies=False)
    masks, alike = _equal_masks(facts)
    looked, found = looked + masks, [*found, *alike]
    skipped = "" if looked else "no generator was recorded on several ranks in two steps in a row"
    if not found:
        return Answer(exercised=looked, skipped=skipped)
    first = in_execution_order(facts, found)[0]
    finding = Finding(
        id="rng.became_equal",
        severity=Severity.WARNING,
        confidence=0.8,
        title="ranks that drew different random numbers draw the same ones from some step on",
        evidence=(
            f"{first.record.key.describe()}: {first.text}",
            "drawing numbers cannot do that: a state was copied, or seeded anew",
        ),
        remedy="save and load the state of every rank, also of data-parallel and expert-parallel ones; seed "
        "by the rank where ranks are to draw different numbers",
        where=first.record.key,
    )
    return Answer(exercised=looked, failed=len(found), findings=(finding,))


def _equal_masks(facts: RunFacts) -> tuple[int, list[Found]]:
    """Return how many calls of dropout were looked at, and those from which on ranks drop alike."""
    masks: dict[tuple[object, ...], dict[int, dict[int, tuple[int, TensorRecord]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for rank in facts.ranks:
        inputs = {call_of(r): r for r in facts.of(rank, Phase.FPROP, Role.INPUT, slot="0") if is_dropout(r)}
        for record in facts.of(rank, Phase.FPROP, Role.OUTPUT, slot="0"):
            given = inputs.get(call_of(record)) if is_dropout(record) else None
            dropped = _dropped(facts, rank, given, record) if given is not None else None
            if dropped is not None:
                key = record.key
                at = facts.ranks[rank].coordinates
                place = key.fqn, key.microbatch, key.occurrence, key.recomputed, at.tp_rank, at.pp_rank
                masks[place][key.step][rank] = dropped, record
    looked, found = 0, []
    for steps in masks.values():
        for before, after in pairwise(sorted(steps)):
            looked += 1
            ranks = _alike({r: mask for r, (mask, _) in steps[before].items()},
                           {r: mask for r, (mask, _) in steps[after].items()})  # fmt: skip
            if ranks:
                text = (
                    f"ranks {', '.join(map(str, ranks))} drop the same elements, and did not in step {before}"
                )
                found.append(Found(rank=ranks[0], record=steps[after][ranks[0]][1], text=text))
    return looked, found


def _dropped(facts: RunFacts, rank: int, given: TensorRecord, gave: TensorRecord) -> int | None:
    """Return a number that stands for which elements a call dropped; None: none, or no elements were kept."""
    if given.digest.same_bits(gave.digest) or given.shape != gave.shape:
        return None
    one, two = numbers(facts, rank, given), numbers(facts, rank, gave)
    if one is None or two is None:
        return None
    mask = (two == 0) & (one != 0)
    return hash(mask.tobytes()) if mask.any() else None


_HOSTS = ("python", "numpy")
"""Generators that loaders seed as they please."""


def _met(before: Mapping[int, TensorRecord], after: Mapping[int, TensorRecord]) -> list[int]:
    """Return ranks of one state now, at least two of which stood apart before."""
    one, two = ({r: record.digest.fingerprint for r, record in side.items()} for side in (before, after))
    return _alike(one, two)


def _alike(before: Mapping[int, int], after: Mapping[int, int]) -> list[int]:
    groups: dict[int, list[int]] = defaultdict(list)
    for rank in sorted(before.keys() & after.keys()):
        groups[after[rank]].append(rank)
    return next((ranks for ranks in groups.values() if len({before[rank] for rank in ranks}) > 1), [])
