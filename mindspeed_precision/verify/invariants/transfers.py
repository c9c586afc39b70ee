"""Pipeline stages: what one stage sends is what the next one works on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from mindspeed_precision.records import Finding, Phase, RankCoordinates, Role, Severity, TensorRecord
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.places import Found, in_execution_order, of_collective, seen_first
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import each_replica

_Place = tuple[int, int, int, int]
"""Rank, step, microbatch; and, of a tensor, how many elements it has."""


@invariant(
    "parallel.stage_received_other",
    holds="a pipeline stage works on what the stage before sent, and forward again in the backward pass",
    unit="transfers",
    span=[each_replica()],
)
def stages_receive_what_was_sent(facts: RunFacts) -> Answer:
    """Look for the output of each stage among what modules of the next stage are given, by its bits."""
    if max(rank.coordinates.pp_size for rank in facts.ranks.values()) == 1:
        return Answer(exercised=0, applies=False)
    looked, found = 0, []
    for sent_role, phase, got_role, ahead in (
        (Role.OUTPUT, Phase.FPROP, Role.INPUT, 1),
        (Role.GRAD_OUTPUT, Phase.DGRAD, Role.GRAD_INPUT, 1),
    ):
        got = _received(facts, phase, got_role)
        for rank, record, other in _stage_outputs(facts, phase, sent_role, ahead):
            candidates = got.get((other, record.key.step, record.key.microbatch, record.numel), ())
            alike = [one for one in candidates if (one.shape, one.dtype) == (record.shape, record.dtype)]
            if alike:
                looked += 1
                if not any(one.digest.same_bits(record.digest) for one in alike):
                    found.append(_found(facts, rank, record, other, alike))
    skipped = "" if looked else "no output of a stage, and input of the next, was recorded"
    if not found:
        return Answer(exercised=looked, skipped=skipped)
    first = in_execution_order(facts, found)[0]
    finding = Finding(
        id="parallel.stage_received_other",
        severity=Severity.ERROR,
        confidence=0.98,
        title="a pipeline stage works on something else than what its neighbour sent",
        evidence=(f"{first.record.key.describe()}: {first.text}", f"{len(found)} of {looked} transfers"),
        remedy="look at the transfer between the stages: buffers that are written before they were sent, "
        "streams that do not wait, the driver (a run with the batched transfers off tells)",
        where=first.record.key,
    )
    return Answer(
        exercised=looked, failed=len(found), findings=(seen_first(first, facts, finding, count=len(found)),)
    )


def _found(
    facts: RunFacts, rank: int, record: TensorRecord, other: int, alike: Sequence[TensorRecord]
) -> Found:
    """Place the difference where it is seen first: at the receiver, forward that is the next stage."""
    if record.key.phase is Phase.FPROP:
        text = f"rank {other} got it from rank {rank}, where it has other bits"
        return Found(rank=other, record=min(alike, key=lambda one: one.seq), text=text)
    return Found(rank=rank, record=record, text=f"rank {other} sent it, where it has other bits")


def _stage_outputs(
    facts: RunFacts, phase: Phase, role: Role, ahead: int
) -> Iterator[tuple[int, TensorRecord, int]]:
    """Yield what each stage's model gives, or is given back, with the rank of the stage after it."""
    at = {_where(rank.coordinates): number for number, rank in facts.ranks.items()}
    for number, rank in facts.ranks.items():
        where = rank.coordinates
        place = ((where.pp_rank + ahead) % where.pp_size, *_where(where)[1:])
        other = at.get(place)
        if other is None:
            continue
        for record in facts.of(number, phase, role, slot="0"):
            if (
                not record.key.fqn
                and not record.key.recomputed
                and record.dtype.startswith(("float", "bfloat"))
            ):
                yield number, record, other


def _where(where: RankCoordinates) -> tuple[int, int, int, int]:
    return where.pp_rank, where.dp_rank, where.tp_rank, where.cp_rank


def _received(facts: RunFacts, phase: Phase, role: Role) -> Mapping[_Place, Sequence[TensorRecord]]:
    found: dict[_Place, list[TensorRecord]] = defaultdict(list)
    for rank, record in facts.everywhere(phase, role):
        if not of_collective(record) and not record.key.recomputed:
            found[rank, record.key.step, record.key.microbatch, record.numel].append(record)
    return found
