"""The GEMM that makes dW multiplies what its module received, and the gradient that came to it."""

from __future__ import annotations

import numpy as np

from mindspeed_precision.records import TensorRecord
from mindspeed_precision.verify.failures import Failure, failure, findings_of
from mindspeed_precision.verify.gradients import Gemm, gemms
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.recomputation.calls import ModuleCall, calls_of, elements
from mindspeed_precision.verify.recomputation.linear import KINDS
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import each_rank

_ID = "wgrad.operand_not_received"


@invariant(
    _ID,
    holds="the operands of dW's GEMM are what the module received and the gradient of what it gave",
    unit="operands",
    span=[each_rank()],
)
def operands(facts: RunFacts) -> Answer:
    """Compare the bits of each operand with those of the module's own tensors."""
    failures: list[Failure] = []
    exercised, gathered = 0, 0
    for rank, held in facts.ranks.items():
        calls = calls_of(facts, rank)
        for one in gemms(held):
            key = one.wgrad.key
            call = calls.get((key.step, key.microbatch, key.fqn, key.occurrence))
            for operand, came in _pairs(one, call):
                if came is None or came.numel != operand.numel or came.dtype != operand.dtype:
                    gathered += 1
                    continue
                exercised += 1
                if not operand.digest.same_bits(came.digest):
                    failures.append(failure(operand, rank, *_how(facts, rank, operand, came)))
    return Answer(
        exercised=exercised,
        findings=findings_of(
            failures,
            id=_ID,
            title="an operand of dW's GEMM is not what the module received",
            remedy="what is between the module and its GEMM: a buffer that was used again or overwritten, "
            "strides that a kernel takes for dense, rows in another order, a cast of saved activations",
        ),
        failed=len(failures),
        skipped=f"{gathered} operands that are gathered or cast first, or whose module was not recorded"
        if gathered
        else ("" if exercised else "no GEMM of a parallel linear was recorded with its operands"),
    )


def _pairs(one: Gemm, call: ModuleCall | None) -> list[tuple[TensorRecord, TensorRecord | None]]:
    if call is None or call.kind not in KINDS:
        return [(one.grad_output, None), (one.received, None)]
    return [(one.grad_output, call.grad_outputs.get("0")), (one.received, call.received("0", "input_"))]


def _how(facts: RunFacts, rank: int, operand: TensorRecord, came: TensorRecord) -> tuple[str, str]:
    """Say how an operand differs: in the order of its rows or of its elements, or in its numbers."""
    if operand.digest.unordered != came.digest.unordered:
        return "other numbers than the module's tensor", ""
    one, two = elements(facts, rank, operand), elements(facts, rank, came)
    if one is None or two is None:
        return "the same numbers in another order", "in another order"
    left, right = (array.reshape(-1, array.shape[-1]) for array in (one, two))
    same_rows = left.shape == right.shape and np.array_equal(
        left[np.lexsort(left.T)], right[np.lexsort(right.T)]
    )
    if same_rows:
        return "the same rows in another order", "its rows are in another order"
    return "the same numbers at other places", "its numbers are at other places, as by other strides"
