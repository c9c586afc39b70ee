"""Layout lint: how tensors lay in memory where that has broken trainings. Warnings: values are not judged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from mindspeed_precision.counting import count
from mindspeed_precision.records import Finding, Layout, Phase, RecordKey, Role, Severity, TensorRecord
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.partial import Partial
from mindspeed_precision.verify.places import Found, in_execution_order, of_collective, seen_first
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import each_rank, each_stage

_OF_COLLECTIVES = (
    (Phase.FPROP, Role.INPUT),
    (Phase.FPROP, Role.OUTPUT),
    (Phase.DGRAD, Role.GRAD_OUTPUT),
    (Phase.DGRAD, Role.GRAD_INPUT),
    (Phase.REDUCE, Role.MAIN_GRAD),
    (Phase.REDUCE, Role.REDUCED_GRAD),
)


@invariant(
    "layout.collective_operand",
    holds="what collectives read and write lies densely in memory, each element once",
    unit="operands",
    span=[each_rank()],
)
def collective_operands(facts: RunFacts) -> Answer:
    """Find operands of collectives that have gaps, another order, or elements that share memory."""
    seen, found = 0, []
    for kind in _OF_COLLECTIVES:
        for rank, record in facts.everywhere(*kind):
            if of_collective(record) and record.layout is not None:
                seen += 1
                text = _flaw(record)
                if text:
                    found.append(Found(rank=rank, record=record, text=text))
    if not found:
        return Answer(
            exercised=seen, skipped="" if seen else "no collective was recorded (capture.collectives)"
        )
    remedy = (
        "give the collective a contiguous tensor, and use what it gives back: not the tensor it was made from"
    )
    finding = _warning(
        facts, "layout.collective_operand", "a collective works on a tensor that is not dense", found, remedy
    )
    return Answer(exercised=seen, failed=len(found), findings=(finding,))


def overlapping(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Tell whether elements share memory: a dimension of several has no stride (an expanded tensor)."""
    return any(step == 0 and size > 1 for step, size in zip(layout.stride, shape, strict=False))


def _flaw(record: TensorRecord) -> str:
    layout = record.layout
    if layout is None or record.numel < 2:
        return ""
    if overlapping(layout, record.shape):
        return f"elements share memory: shape {list(record.shape)}, strides {list(layout.stride)}"
    return "" if layout.contiguous else f"shape {list(record.shape)}, strides {list(layout.stride)}"


@invariant(
    "layout.differs_between_ranks",
    holds="the operands of one GEMM of dW lie alike in memory on all ranks",
    unit="operands with counterparts",
    span=[each_stage((Phase.WGRAD, Role.INPUT), (Phase.WGRAD, Role.GRAD_OUTPUT))],
)
def operands_alike(facts: RunFacts) -> Answer:
    """Compare the order of strides of each operand over the ranks that have one of its name."""
    held: dict[RecordKey, list[Found]] = defaultdict(list)
    for role in (Role.INPUT, Role.GRAD_OUTPUT):
        for rank, record in facts.everywhere(Phase.WGRAD, role):
            if record.layout is not None:
                held[record.key].append(Found(rank=rank, record=record))
    several = [members for members in held.values() if len(members) > 1]
    found = []
    for members in several:
        orders = {_order(member.record) for member in members}
        if len(orders) > 1:
            text = "; ".join(f"rank {m.rank}: strides {list(_stride(m.record))}" for m in members[:4])
            found.append(Found(rank=members[0].rank, record=members[0].record, text=text))
    if not found:
        alone = len(facts.coordinates) == 1
        return Answer(
            exercised=len(several),
            applies=not alone,
            skipped="" if several else "no operand of a GEMM was recorded on two ranks",
        )
    remedy = (
        "the kernel may sum in another order on each rank: make the operands contiguous "
        "(remedies=[wgrad_contiguous_operands])"
    )
    finding = _warning(
        facts,
        "layout.differs_between_ranks",
        "an operand of dW lies in memory differently on each rank",
        found,
        remedy,
    )
    return Answer(exercised=len(several), failed=len(found), findings=(finding,))


def _stride(record: TensorRecord) -> tuple[int, ...]:
    return record.layout.stride if record.layout is not None else ()


def _order(record: TensorRecord) -> tuple[object, ...]:
    """Return how the dimensions of more than one element follow each other in memory, and whether densely."""
    assert record.layout is not None
    steps = [
        (step, dim)
        for dim, (step, size) in enumerate(zip(record.layout.stride, record.shape, strict=False))
        if size > 1
    ]
    return (
        tuple(dim for _, dim in sorted(steps, reverse=True)),
        record.layout.contiguous,
        record.layout.format,
    )


def _warning(facts: RunFacts, id_: str, title: str, found: Iterable[Found], remedy: str) -> Partial:
    ordered = in_execution_order(facts, found)
    first = ordered[0]
    names = sorted({one.record.key.fqn or "(model)" for one in ordered})
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    finding = Finding(
        id=id_,
        severity=Severity.WARNING,
        confidence=0.6,
        title=title,
        evidence=(
            f"first: rank {first.rank}, {first.record.key.describe()}: {first.text}",
            f"{count(len(ordered), 'record')} of {shown}",
        ),
        remedy=remedy,
        where=first.record.key,
    )
    return seen_first(first, facts, finding, count=len(ordered))
