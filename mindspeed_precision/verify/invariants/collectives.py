"""Collectives inside the model: their result is used, and copies are not summed up."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from mindspeed_precision.records import Finding, Phase, Role, Severity, TensorRecord
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.places import Found, by_group, in_execution_order, of_collective, seen_first
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import each_rank, each_replica

_ROLES = {Phase.FPROP: (Role.INPUT, Role.OUTPUT), Phase.DGRAD: (Role.GRAD_OUTPUT, Role.GRAD_INPUT)}
_Call = tuple[int, TensorRecord, TensorRecord]
"""Rank, what an all-reduce was given, what it gave back."""


def _all_reduces(facts: RunFacts, phase: Phase) -> Iterator[_Call]:
    """Yield what all-reduces inside modules, or in the backward pass, were given and gave back."""
    given_role, got_role = _ROLES[phase]
    for rank in facts.ranks:
        got = {_name(r): r for r in facts.of(rank, phase, got_role) if of_collective(r, "all_reduce")}
        for given in facts.of(rank, phase, given_role):
            result = got.get(_name(given)) if of_collective(given, "all_reduce") else None
            if result is not None and given.shape == result.shape:
                yield rank, given, result


def _name(record: TensorRecord) -> tuple[object, ...]:
    key = record.key
    return key.step, key.microbatch, key.fqn, key.slot, key.occurrence, key.recomputed


@invariant(
    "reduce.result_discarded",
    holds="what an all-reduce inside the model gives back is what flows on, not what it was given",
    unit="all-reduces",
    span=[each_rank()],
)
def result_flows_on(facts: RunFacts) -> Answer:
    """Find all-reduces whose operand turns up later with the bits of before, and whose result never does."""
    if max(rank.coordinates.tp_size for rank in facts.ranks.values()) == 1:
        return Answer(exercised=0, applies=False)
    looked, found = 0, []
    for phase in _ROLES:
        later = _later(facts, phase)
        for rank, given, got in _all_reduces(facts, phase):
            if given.digest.fingerprint and got.digest.fingerprint and not given.digest.same_bits(got.digest):
                looked += 1
                moment = rank, given.key.step, given.key.microbatch
                flows = [r for r in later.get((*moment, given.digest.fingerprint), ()) if r.seq > got.seq]
                used = any(r.seq > got.seq for r in later.get((*moment, got.digest.fingerprint), ()))
                if flows and not used:
                    text = f"what it was given is {flows[0].key.describe()}; what it gave back is nowhere"
                    found.append(Found(rank=rank, record=flows[0], text=text))
    skipped = "" if looked else "no all-reduce that changed its operand was recorded with what follows it"
    if not found:
        return Answer(exercised=looked, skipped=skipped)
    first = in_execution_order(facts, found)[0]
    finding = Finding(
        id="reduce.result_discarded",
        severity=Severity.ERROR,
        confidence=0.98,
        title=f"{first.record.key.fqn or '(model)'} gets a partial sum: the all-reduce before it is lost",
        evidence=(f"rank {first.rank}: {first.text}", f"{len(found)} all-reduces"),
        remedy="an all-reduce of x.contiguous() leaves x alone where that is a copy: give it a contiguous "
        "tensor",
        where=first.record.key,
    )
    return Answer(
        exercised=looked, failed=len(found), findings=(seen_first(first, facts, finding, count=len(found)),)
    )


def _later(facts: RunFacts, phase: Phase) -> Mapping[tuple[int, int, int, int], Sequence[TensorRecord]]:
    """Return what modules receive and return in a phase, by rank, moment and bits."""
    found: dict[tuple[int, int, int, int], list[TensorRecord]] = defaultdict(list)
    for role in _ROLES[phase]:
        for rank, record in facts.everywhere(phase, role):
            if not of_collective(record):
                key = record.key
                found[rank, key.step, key.microbatch, record.digest.fingerprint].append(record)
    return found


@invariant(
    "reduce.copies_summed",
    holds="an all-reduce over the tensor-parallel group adds up parts, and not copies of one tensor",
    unit="all-reduces",
    span=[each_replica()],
)
def copies_are_not_summed(facts: RunFacts) -> Answer:
    """Find all-reduces in modules whose operands are equal on the whole group, and are summed up."""
    if max(rank.coordinates.tp_size for rank in facts.ranks.values()) == 1:
        return Answer(exercised=0, applies=False)
    calls = [call for call in _all_reduces(facts, Phase.FPROP) if not _counts(call[1])]
    results = {(rank, given.key): got for rank, given, got in calls}
    groups = by_group(facts, [(rank, given) for rank, given, _ in calls])
    found = [
        Found(
            rank=members[0][0],
            record=members[0][1],
            text=f"equal on ranks {', '.join(str(r) for r, _ in members)}",
        )
        for members in groups.values()
        if _summed(facts, members, results[members[0][0], members[0][1].key])
    ]
    skipped = (
        "" if groups else "no all-reduce of a module was recorded on all ranks of a tensor-parallel group"
    )
    if not found:
        return Answer(exercised=len(groups), skipped=skipped)
    first = in_execution_order(facts, found)[0]
    finding = Finding(
        id="reduce.copies_summed",
        severity=Severity.ERROR,
        confidence=0.98,
        title=f"{first.record.key.fqn or 'the loss of the model'}: copies of one tensor are added up over the"
        " tensor-parallel group",
        evidence=(
            f"{first.record.key.describe()}: {first.text}, the result is their sum",
            *_whole_logits(facts, first),
        ),
        remedy="what is whole on every rank must not be reduced; of a loss: parallel_output=True, so that "
        "each rank has its part of the vocabulary",
        where=first.record.key,
    )
    return Answer(
        exercised=len(groups),
        failed=len(found),
        findings=(seen_first(first, facts, finding, count=len(found)),),
    )


def _counts(record: TensorRecord) -> bool:
    """Tell whether it is whole numbers: tokens per expert are few, and equal on two ranks by chance."""
    return record.dtype.startswith(("int", "uint", "bool"))


def _summed(facts: RunFacts, members: Sequence[tuple[int, TensorRecord]], result: TensorRecord) -> bool:
    """Tell whether all ranks of the group gave the same bits, and got as many times that."""
    size = facts.ranks[members[0][0]].coordinates.tp_size
    given = members[0][1].digest
    one, all_ = given.statistics, result.digest.statistics
    if len(members) < size or one is None or all_ is None or one.l2_norm == 0:
        return False
    return all(given.same_bits(record.digest) for _, record in members) and all(
        math.isclose(size * before, after, rel_tol=1e-5)
        for before, after in (
            (one.minimum, all_.minimum),
            (one.maximum, all_.maximum),
            (one.l2_norm, all_.l2_norm),
        )
    )


def _whole_logits(facts: RunFacts, first: Found) -> Iterator[str]:
    """Say it where the loss is that of logits which are whole on every rank."""
    if first.record.key.fqn:
        return
    size = facts.ranks[first.rank].coordinates.tp_size
    for record in facts.of(first.rank, Phase.FPROP, Role.OUTPUT, step=first.record.key.step, slot="0"):
        if record.key.fqn == "output_layer" and not record.key.recomputed:
            yield (
                f"the output layer gives {record.shape[-1]} logits on each of {size} ranks; if that is the "
                f"whole vocabulary, the loss is too large by log({size}) = {math.log(size):.4f}"
            )
            return
