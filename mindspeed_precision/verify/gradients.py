"""The gradients of one rank in the order in which they came: what was added, and what each GEMM made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mindspeed_precision.dump.reader import RankRecords
from mindspeed_precision.records import Phase, Role, TensorRecord

_GRADIENTS = (Role.WGRAD, Role.BGRAD)


@dataclass(frozen=True, kw_only=True)
class Accumulation:
    """One gradient of one microbatch on its way into ``main_grad`` (or ``.grad``) of a parameter.

    Attributes:
        fqn: the parameter.
        step: of the training.
        microbatch: of the step.
        added: dW as it reached the parameter; None: a fused GEMM added it, and it never was a tensor.
        before: what it was added to; None: nothing yet (``.grad`` of the first microbatch).
        after: the sum; None: it was not recorded.
    """

    fqn: str
    step: int
    microbatch: int
    added: TensorRecord | None = None
    before: TensorRecord | None = None
    after: TensorRecord | None = None

    @property
    def last(self) -> TensorRecord:
        """The latest of its records."""
        found = self.after or self.before or self.added
        assert found is not None
        return found


def accumulations(rank: RankRecords) -> Iterator[Accumulation]:
    """Yield every accumulation that a rank recorded, in the order in which they ended."""
    known = {parameter.fqn for parameter in rank.parameters}
    open_: dict[str, Accumulation] = {}
    for record in rank.records:
        key = record.key
        if key.fqn not in known:
            continue
        current = open_.get(key.fqn)
        if current is not None and (key.step, key.microbatch) != (current.step, current.microbatch):
            yield open_.pop(key.fqn)
            current = None
        fresh = Accumulation(fqn=key.fqn, step=key.step, microbatch=key.microbatch)
        if key.phase is Phase.WGRAD and key.role in _GRADIENTS:
            if current is not None:
                yield current
            open_[key.fqn] = replace(fresh, added=record)
        elif key.phase is Phase.ACCUMULATE and key.slot == "before":
            if current is not None and current.before is not None:
                yield current
                current = None
            open_[key.fqn] = replace(current or fresh, before=record)
        elif key.phase is Phase.ACCUMULATE and key.slot == "after":
            open_.pop(key.fqn, None)
            yield replace(current or fresh, after=record)
    yield from open_.values()


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """One product that made dW of a linear.

    Attributes:
        grad_output: ``[tokens, out]``.
        received: ``[tokens, in]``, the input.
        wgrad: ``[out, in]``; under fusion the difference of ``main_grad``.
        before: ``main_grad`` before a fused GEMM; None without fusion.
        after: ``main_grad`` after it.
    """

    grad_output: TensorRecord
    received: TensorRecord
    wgrad: TensorRecord
    before: TensorRecord | None = None
    after: TensorRecord | None = None

    @property
    def fused(self) -> bool:
        """Whether dW was added inside the GEMM, so that it is known as a difference only."""
        return bool(self.wgrad.note)


class _Walk:
    """The state of a walk over records: what was seen of the product that comes next."""

    def __init__(self) -> None:
        self.left: TensorRecord | None = None
        self.right: TensorRecord | None = None
        self.before: TensorRecord | None = None
        self.waiting: Gemm | None = None

    def accumulated(self, record: TensorRecord) -> Iterator[Gemm]:
        """Take ``main_grad`` around a fused product."""
        if self.waiting is not None and record.key.slot == "after":
            yield replace(self.waiting, after=record)
            self.waiting = None
        elif record.key.slot == "before" and self.right is not None:
            self.before = record

    def multiplied(self, record: TensorRecord) -> Iterator[Gemm]:
        """Take an operand or a result."""
        yield from self.end()
        role, fqn = record.key.role, record.key.fqn
        if role is Role.GRAD_OUTPUT:
            self.left, self.right, self.before = record, None, None
        elif role is Role.INPUT and self.left is not None and self.left.key.fqn == fqn:
            self.right = record
        elif role is Role.WGRAD and self.left is not None and self.right is not None:
            if fqn == self.left.key.fqn:
                yield from self._product(record, self.left, self.right)
            self.left = self.right = self.before = None

    def _product(self, wgrad: TensorRecord, left: TensorRecord, right: TensorRecord) -> Iterator[Gemm]:
        found = Gemm(grad_output=left, received=right, wgrad=wgrad)
        if found.fused:
            self.waiting = replace(found, before=self.before)
        else:
            yield found

    def end(self) -> Iterator[Gemm]:
        """Give out a fused product of which ``main_grad`` afterwards was not recorded."""
        if self.waiting is not None:
            yield self.waiting
            self.waiting = None


def gemms(rank: RankRecords) -> Iterator[Gemm]:
    """Yield every product of a parallel linear's backward that a rank recorded with both operands."""
    walk = _Walk()
    for record in rank.records:
        if record.key.phase is Phase.ACCUMULATE:
            yield from walk.accumulated(record)
        elif record.key.phase is Phase.WGRAD:
            yield from walk.multiplied(record)
    yield from walk.end()
