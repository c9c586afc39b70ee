"""The gradient buffer: empty when a step begins, left alone between microbatches, filled by each of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from mindspeed_precision.dump.reader import RankRecords
from mindspeed_precision.record.fingerprint import is_zero
from mindspeed_precision.records import Phase, RecordKey, Role, TensorRecord
from mindspeed_precision.verify.failures import Failure, failure, findings_of
from mindspeed_precision.verify.gradients import Accumulation, accumulations
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import each_rank


def zero(record: TensorRecord) -> bool:
    """Tell whether every element is zero; without statistics by the fingerprints, which know +0.0 alone."""
    found = record.digest.statistics
    if found is not None:
        return found.zeros == record.numel
    return is_zero(record.digest.fingerprint, record.digest.unordered, record.numel)


@invariant(
    "accumulate.not_zero_at_start",
    holds="main_grad is zero before the first gradient of a step is added to it",
    unit="parameters x steps",
    span=[each_rank()],
)
def buffer_is_empty_at_first(facts: RunFacts) -> Answer:
    """Look at main_grad before the first accumulation of each parameter in each step."""
    failures, exercised = [], 0
    for number, rank in facts.ranks.items():
        seen: set[tuple[int, str]] = set()
        for one in accumulations(rank):
            if (one.step, one.fqn) in seen:
                continue
            seen.add((one.step, one.fqn))
            if one.before is None or one.microbatch:  # the first microbatch was not recorded
                continue
            exercised += 1
            if not zero(one.before):
                statistics = one.before.digest.statistics
                size = f"its norm is {statistics.l2_norm:.6g}" if statistics else "it is not zero"
                failures.append(failure(one.before, number, size))
    return Answer(
        exercised=exercised,
        findings=findings_of(
            failures,
            id="accumulate.not_zero_at_start",
            title="main_grad is not zero when a step begins to accumulate",
            remedy="call zero_grad_buffer() and optimizer.zero_grad() before each step; look for what "
            "writes into the buffer between the steps",
            confidence=0.97,
        ),
        failed=len(failures),
        skipped="" if exercised else "no main_grad was recorded before an accumulation (capture.wgrad)",
    )


@invariant(
    "accumulate.changed_between",
    holds="main_grad before a microbatch's gradient is what the microbatch before it left",
    unit="pairs of microbatches",
    span=[each_rank()],
)
def buffer_is_left_alone(facts: RunFacts) -> Answer:
    """Compare bits of main_grad before a microbatch with those after the one before."""
    failures, exercised = [], 0
    for number, rank in facts.ranks.items():
        left: dict[str, Accumulation] = {}
        for one in accumulations(rank):
            earlier = left.get(one.fqn)
            left[one.fqn] = one
            if earlier is None or earlier.after is None or one.before is None or not _follows(earlier, one):
                continue
            exercised += 1
            if earlier.after.digest.fingerprint != one.before.digest.fingerprint:
                failures.append(failure(one.before, number, *_changed(earlier.after, one.before)))
    return Answer(
        exercised=exercised,
        findings=findings_of(
            failures,
            id="accumulate.changed_between",
            title="main_grad was changed between two microbatches",
            remedy="look for what writes into the gradient buffer between microbatches: a reduction "
            "that runs too early or in place in a group of one rank, a gather that shares the buffer, a "
            "second backward",
        ),
        failed=len(failures),
        skipped="" if exercised else "no step had two accumulations of one parameter",
    )


def _follows(earlier: Accumulation, one: Accumulation) -> bool:
    """Tell whether no accumulation comes between, nor the step begins anew."""
    if earlier.step != one.step or earlier.after is None or one.before is None:
        return False
    again = one.before.key.occurrence > earlier.after.key.occurrence  # a tied, fused weight has two
    return one.microbatch == earlier.microbatch + 1 or (one.microbatch == earlier.microbatch and again)


def _changed(after: TensorRecord, before: TensorRecord) -> tuple[str, str]:
    one, two = after.digest.statistics, before.digest.statistics
    if one is None or two is None:
        return "its bits are others", ""
    found = f"its norm was {one.l2_norm:.6g}, and is {two.l2_norm:.6g}"
    ratio = two.l2_norm / one.l2_norm if one.l2_norm else 0.0
    same = ratio and abs(two.mean - ratio * one.mean) <= 1e-5 * ratio * max(
        abs(one.minimum), abs(one.maximum)
    )
    return found, f"it is {ratio:.6g} times what it was" if same and abs(ratio - 1) > 1e-6 else ""


@invariant(
    "accumulate.count",
    holds="every parameter that gets a gradient gets one from each microbatch",
    unit="parameters x steps",
    span=[each_rank()],
)
def one_gradient_of_each_microbatch(facts: RunFacts) -> Answer:
    """Count the accumulations of each parameter in each step, by microbatch."""
    failures: list[Failure] = []
    exercised = 0
    for number, rank in facts.ranks.items():
        counts: dict[tuple[int, str], Counter[int]] = defaultdict(Counter)
        last: dict[tuple[int, str], Accumulation] = {}
        for one in accumulations(rank):
            counts[one.step, one.fqn][one.microbatch] += 1
            last[one.step, one.fqn] = one
        exercised += len(counts)
        for (step, fqn), found in counts.items():
            example = last[step, fqn].last.key
            wanted = (replace(example, microbatch=number) for number in range(rank.microbatches.get(step, 0)))
            expected = sum(not facts.dropped(key) for key in wanted)
            if len(found) < expected:
                text = f"{len(found)} of {expected} microbatches"
                failures.append(failure(last[step, fqn].last, number, text, "microbatches are missing"))
    return Answer(
        exercised=exercised,
        findings=findings_of(
            failures,
            id="accumulate.count",
            title="a parameter did not get a gradient from each microbatch of a step",
            remedy="which microbatch did not use the parameter, or ran without gradients?",
            confidence=0.8,
        ),
        failed=len(failures),
        skipped="" if exercised else "no accumulation was recorded (capture.wgrad)",
    )


@invariant(
    "wgrad.missing",
    holds="every trainable parameter gets a gradient in every step",
    unit="parameters x steps",
    span=[each_rank()],
)
def every_parameter_has_a_gradient(facts: RunFacts) -> Answer:
    """Name trainable parameters of which no dW came, and whose gradient is absent or zero then."""
    failures, exercised, unseen = [], 0, set()
    for number, rank in facts.ranks.items():
        steps = [step for step in facts.steps if rank.microbatches.get(step)]
        came = _with_gradient(rank)
        if not came:
            continue
        reduced = _reduced(rank)
        trainable = [p.fqn for p in rank.parameters if p.trainable and not p.tied_to]
        for step in steps:
            exercised += len(trainable)
            for index, fqn in enumerate(trainable):
                if (step, fqn) in came:
                    continue
                found = reduced.get((step, fqn))
                gap = _gap(step, fqn, number, len(trainable) - index)
                if facts.dropped(gap.where) or facts.dropped(replace(gap.where, microbatch=0)):
                    continue
                if found is not None and not zero(found):
                    unseen.add(fqn)  # it has one, which came on a way that is not observed
                    continue
                failures.append(gap)
    skipped = f"dW of {len(unseen)} parameters came on a way that is not observed" if unseen else ""
    return Answer(
        exercised=exercised,
        findings=findings_of(
            failures,
            id="wgrad.missing",
            title="a trainable parameter got no gradient in a step",
            remedy="is its module in the graph of the loss? A detached output, a dropped keyword of a "
            "recomputed layer and a loss that is not used cut it off; freeze it if that is meant",
            confidence=0.9,
        ),
        failed=len(failures),
        skipped=skipped if exercised else "no dW was recorded (capture.wgrad)",
    )


def _with_gradient(rank: RankRecords) -> set[tuple[int, str]]:
    # an accumulation of nothing ends, too: autograd calls what follows it for a gradient that is None
    came = (one for one in accumulations(rank) if one.added is not None or one.before is not None)
    return {(one.step, one.fqn) for one in came}


def _reduced(rank: RankRecords) -> dict[tuple[int, str], TensorRecord]:
    return {
        (record.key.step, record.key.fqn): record
        for record in rank.records
        if record.key.role is Role.REDUCED_GRAD
    }


def _gap(step: int, fqn: str, rank: int, from_the_end: int) -> Failure:
    """Return a parameter without a gradient; of several that are cut off the last is nearest to the cut."""
    role = Role.BGRAD if fqn.endswith(".bias") else Role.WGRAD
    where = RecordKey(step=step, phase=Phase.WGRAD, fqn=fqn, role=role)
    return Failure(where=where, rank=rank, seq=from_the_end, found="no dW in any microbatch")
