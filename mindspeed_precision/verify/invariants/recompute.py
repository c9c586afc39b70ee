"""Recomputation: what the backward pass computes again is what the forward pass computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mindspeed_precision.records import Finding, Phase, Role, Severity, TensorRecord
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.places import Found, in_execution_order, of_collective, seen_first
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import each_rank


@invariant(
    "fprop.recomputed_differs",
    holds="a recomputed activation has the bits that it had in the forward pass",
    unit="recomputed tensors",
    span=[each_rank()],
)
def recomputed_equals_first(facts: RunFacts) -> Answer:
    """Find the first module whose recomputation gives other bits, and what it was given."""
    pairs = [(rank, first, again) for rank in facts.ranks for first, again in _pairs(facts, rank)]
    found = [
        Found(rank=rank, record=again)
        for rank, first, again in pairs
        if not first.digest.same_bits(again.digest)
    ]
    recomputes = any(
        record.key.recomputed for rank in facts.ranks for record in facts.of(rank, Phase.FPROP, Role.OUTPUT)
    )
    if not found:
        return Answer(
            exercised=len(pairs),
            applies=recomputes,
            skipped="" if pairs else "no tensor was recorded both times",
        )
    ordered = in_execution_order(facts, found)
    first = ordered[0]
    given = [one for one in ordered if one.record.key.role is Role.INPUT]
    same_inputs = not given or given[0].record.seq > first.record.seq
    finding = Finding(
        id="fprop.recomputed_differs",
        severity=Severity.ERROR,
        confidence=0.95,
        title=f"{first.record.key.fqn or '(model)'}: the recomputed {first.record.key.role.value} is not "
        "that of the forward pass",
        evidence=(
            f"rank {first.rank}, {first.record.key.describe()}",
            "what it was given has the same bits both times"
            if same_inputs
            else "what it was given differs, too",
            f"{len(found)} of {len(pairs)} recomputed tensors differ",
        ),
        remedy="the recomputation must see what the forward pass saw: restore the random states "
        "(tensor_parallel.checkpoint does), and keep masks, sequence lengths and caches of the microbatch in "
        "the closure, not in globals that the next microbatch overwrites",
        where=first.record.key,
    )
    return Answer(
        exercised=len(pairs),
        failed=len(found),
        findings=(seen_first(first, facts, finding, count=len(found)),),
    )


def _pairs(facts: RunFacts, rank: int) -> Iterator[tuple[TensorRecord, TensorRecord]]:
    """Yield what was recorded both times; collectives have no numbers of their own in a recomputation."""
    for role in (Role.INPUT, Role.OUTPUT):
        records = facts.of(rank, Phase.FPROP, role)
        first = {record.key: record for record in records if not record.key.recomputed}
        for record in records:
            other = first.get(replace(record.key, recomputed=False)) if record.key.recomputed else None
            if other is not None and other.shape == record.shape and not of_collective(record):
                yield other, record
