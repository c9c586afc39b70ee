"""Data: every rank of a lane reads the same batch, and no batch is read twice or left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from mindspeed_precision.counting import count
from mindspeed_precision.records import NO_MICROBATCH, Finding, Phase, RecordKey, Role, Severity, TensorRecord
from mindspeed_precision.verify.batches import Batch, batches, epoch_ends, read_first
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.places import Found, in_execution_order, seen_first, steps_text
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import each_replica, whole_run

_NO_BATCHES = "no batch with tokens, inputs or pictures was recorded (capture.batch)"


@invariant(
    "data.lane_reads_other_batches",
    holds="ranks that compute one part of the batch together read the same batch",
    unit="batch tensors with copies",
    span=[each_replica()],
)
def lane_reads_one_batch(facts: RunFacts) -> Answer:
    """Compare the batches of the ranks that differ by their place in TP, PP and CP alone."""
    held: dict[tuple[int, RecordKey], list[tuple[int, TensorRecord]]] = defaultdict(list)
    for rank, record in facts.everywhere(Phase.BATCH, Role.BATCH):
        if record.key.microbatch != NO_MICROBATCH and not record.key.occurrence:
            held[facts.ranks[rank].coordinates.dp_rank, record.key].append((rank, record))
    copies = {place: members for place, members in held.items() if len(members) > 1}
    found = [
        Found(rank=members[0][0], record=members[0][1], text=_bits_of(members))
        for members in copies.values()
        if len({(record.digest.fingerprint, record.shape) for _, record in members}) > 1
    ]
    alone = len(facts.ranks) == len({rank.coordinates.dp_rank for rank in facts.ranks.values()})
    if not found:
        return Answer(
            exercised=len(copies), skipped="" if copies else "one rank of each lane reads", applies=not alone
        )
    first = in_execution_order(facts, found)[0]
    finding = Finding(
        id="data.lane_reads_other_batches",
        severity=Severity.ERROR,
        confidence=0.95,
        title="ranks that compute one data-parallel replica together read different batches",
        evidence=(f"{first.record.key.describe()}: {first.text}", f"{len(found)} of {len(copies)} tensors"),
        remedy="the data loader must take seed, rank and size from the data-parallel group alone",
        where=first.record.key,
    )
    return Answer(
        exercised=len(copies),
        failed=len(found),
        findings=(seen_first(first, facts, finding, count=len(found)),),
    )


def _bits_of(members: Sequence[tuple[int, TensorRecord]]) -> str:
    groups: dict[int, list[int]] = defaultdict(list)
    for rank, record in members:
        groups[record.digest.fingerprint].append(rank)
    return " and ".join(f"ranks {', '.join(map(str, ranks))}" for ranks in groups.values()) + " differ"


@invariant(
    "data.repeated_in_step",
    "data.repeated",
    holds="no batch is read twice, by two ranks, two microbatches or two steps of an epoch",
    unit="batches",
    span=[whole_run(keep=read_first)],
)
def not_repeated(facts: RunFacts) -> Answer:
    """Find equal batches: in one step at once, over steps where something new follows (no new epoch)."""
    read = batches(facts)
    if len(read) < 2:
        return Answer(exercised=len(read), skipped=_NO_BATCHES if not read else "one batch alone was read")
    if _constant(read):
        return Answer(exercised=len(read), findings=(_one_batch(read),))
    within = _repeats([[batch for batch in read if batch.step == step] for step in {b.step for b in read}])
    ends = epoch_ends([batch.bits for batch in read])
    if ends is not None and read[ends].step > read[0].step:
        within = []  # a new epoch, in another order, may begin inside a step
    findings = [_within(within)] if within else []
    over: list[tuple[Batch, Batch]] = []
    if not within and ends is None and _unbroken(read):
        over = _repeats([read])
        findings += [_over(over)] if over else []
    return Answer(
        exercised=len(read), failed=len(within) + len(over) or len(findings), findings=tuple(findings)
    )


def _unbroken(read: Sequence[Batch]) -> bool:
    """Tell whether no step is missing in between: what is new after a gap may be of the epoch before."""
    steps = {batch.step for batch in read}
    return len(steps) == max(steps) - min(steps) + 1


def _repeats(groups: Sequence[Sequence[Batch]]) -> list[tuple[Batch, Batch]]:
    """Return pairs of batches with the same bits, each the first one and a later one, in order."""
    pairs = []
    for group in groups:
        first: dict[tuple[object, ...], Batch] = {}
        for batch in group:
            known = first.setdefault(batch.bits, batch)
            if known is not batch:
                pairs.append((known, batch))
    return sorted(pairs, key=lambda pair: (pair[1].step, pair[1].microbatch, pair[1].lane))


def _constant(read: Sequence[Batch]) -> bool:
    """Tell whether three or more steps read one and the same batch."""
    return len({batch.step for batch in read}) > 2 and len({batch.bits for batch in read}) == 1


def _within(pairs: Sequence[tuple[Batch, Batch]]) -> Finding:
    one, two = pairs[0]
    over_ranks = all(first.lane != second.lane for first, second in pairs)
    remedy = (
        "the sampler must take rank and size of the data-parallel group (data_parallel_rank, _size)"
        if over_ranks
        else "look at the iterator: each microbatch must take a batch of its own"
    )
    return Finding(
        id="data.repeated_in_step",
        severity=Severity.ERROR,
        confidence=0.9,
        title="one step reads the same batch more than once",
        evidence=(
            f"first: {one.place}, again {two.place}",
            f"{len(pairs)} batches are copies, {steps_text(second.step for _, second in pairs)}",
        ),
        remedy=remedy,
        where=two.record.key,
    )


def _over(pairs: Sequence[tuple[Batch, Batch]]) -> Finding:
    one, two = pairs[0]
    return Finding(
        id="data.repeated",
        severity=Severity.WARNING,
        confidence=0.8,
        title="a batch is read again before its epoch is over",
        evidence=(
            f"first: {one.place}, again {two.place}",
            f"{len(pairs)} batches are copies; new ones follow, so that no new epoch has begun",
        ),
        remedy="look at consumed samples after a resume, at the sampler, and at the mixture of data sets",
        where=two.record.key,
    )


def _one_batch(read: Sequence[Batch]) -> Finding:
    return Finding(
        id="data.repeated",
        severity=Severity.WARNING,
        confidence=0.7,
        title="every step reads one and the same batch",
        evidence=(f"{len(read)} batches, {steps_text(batch.step for batch in read)}",),
        remedy="right for a test that overfits one batch; else look at the iterator: it may be made anew in "
        "each step",
        where=read[1].record.key,
    )


@invariant(
    "data.sample_ids",
    holds="sample ids are handed out once, and without gaps where they come in order",
    unit="batches with sample ids",
    span=[whole_run(keep=read_first)],
)
def sample_ids(facts: RunFacts) -> Answer:
    """Find samples that are handed out twice before the stream begins anew, and gaps of an ordered stream."""
    read = [batch for batch in batches(facts) if batch.ids]
    lanes = {rank.coordinates.dp_size for rank in facts.ranks.values()}
    if not read:
        known = any(batch.ids_record is not None for batch in batches(facts))
        reason = (
            "ids were recorded without elements, and are no range"
            if known
            else "no sampler of Megatron's was seen"
        )
        return Answer(exercised=0, skipped=reason)
    finding = _twice(read)
    if finding is None and len({batch.lane for batch in read}) == max(lanes):
        finding = _gap(read)
    return Answer(exercised=len(read), findings=() if finding is None else (finding,))


def _twice(read: Sequence[Batch]) -> Finding | None:
    stream = [(identity, batch) for batch in read for identity in batch.ids]
    if epoch_ends([identity for identity, _ in stream]) is not None:
        return None
    first: dict[int, Batch] = {}
    again = [
        (identity, first[identity], batch) for identity, batch in stream if _known(first, identity, batch)
    ]
    if not again:
        return None
    identity, one, two = again[0]
    return _ids_finding(
        f"{count(len(again), 'sample', 'are')} handed out more than once",
        (f"sample {identity}: {one.place}, again {two.place}",),
        two,
    )


def _known(first: dict[int, Batch], identity: int, batch: Batch) -> bool:
    known = identity in first
    first.setdefault(identity, batch)
    return known


def _gap(read: Sequence[Batch]) -> Finding | None:
    """Find a sample that is left out, where each step begins behind the step before."""
    steps: dict[int, set[int]] = defaultdict(set)
    for batch in read:
        steps[batch.step].update(batch.ids)
    numbers = sorted(steps)
    ordered = all(len(ids) == max(ids) - min(ids) + 1 for ids in steps.values())
    pairs = [(one, two) for one, two in pairwise(numbers) if two == one + 1]
    if not ordered or not pairs:
        return None
    wrong = [(one, two) for one, two in pairs if min(steps[two]) != max(steps[one]) + 1]
    # a stream without order, and one that begins anew, is not continued anywhere
    if not wrong or len(wrong) == len(pairs) or all(min(steps[two]) < min(steps[one]) for one, two in wrong):
        return None
    before, after = wrong[0]
    batch = next(batch for batch in read if batch.step == after)
    return _ids_finding(
        f"samples are skipped between steps {before} and {after}",
        (
            f"step {before} ends with sample {max(steps[before])}, "
            f"step {after} begins with {min(steps[after])}",
        ),
        batch,
    )


def _ids_finding(title: str, evidence: tuple[str, ...], batch: Batch) -> Finding:
    record = batch.ids_record or batch.record
    return Finding(
        id="data.sample_ids",
        severity=Severity.ERROR,
        confidence=0.85,
        title=title,
        evidence=evidence,
        remedy="look at consumed samples, batch-size ramp-up and the sampler's rank and size",
        where=record.key,
    )
