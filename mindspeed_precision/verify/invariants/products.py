"""dW is the product of its operands, and reaches its parameter as the GEMM made it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from mindspeed_precision.dump.reader import RankRecords
from mindspeed_precision.record.freivalds import TF32, Excess, excess
from mindspeed_precision.records import Phase, Role, TensorRecord
from mindspeed_precision.verify.elements import Vector, is_finite, numbers, rounded, roundoff
from mindspeed_precision.verify.failures import Failure, failure, findings_of
from mindspeed_precision.verify.gradients import Gemm, gemms
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.recomputation.exact import underflow
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import each_rank

PRODUCT = "product"
"""Slot of what ``capture.verify_products`` found while training: the worst residual over its bound."""


@invariant(
    "wgrad.not_the_product",
    holds="dW is grad_output.T @ input of its own operands, to rounding",
    unit="products",
    span=[each_rank()],
)
def wgrad_is_a_product(facts: RunFacts) -> Answer:
    """Try random signs on kept elements; else read what was tried while training."""
    failures: list[Failure] = []
    exercised, left = 0, 0
    for number, rank in facts.ranks.items():
        live = _live(facts, number)
        for one in gemms(rank):
            found = _of_elements(facts, number, one)
            key = one.wgrad.key
            counted = live.get((key.step, key.microbatch, key.fqn, key.occurrence))
            if found is not None:
                exercised += 1
                if not found.ratio <= 1:
                    kind = "" if found.factor is None else f"it is {found.factor:.4g} times the product"
                    failures.append(failure(one.wgrad, number, _text(found), kind))
            elif counted is not None:
                exercised += 1
                if counted > 1:
                    text = f"a residual {counted:.3g} times the bound on rounding (checked while training)"
                    failures.append(failure(one.wgrad, number, text))
            else:
                left += 1
    return Answer(
        exercised=exercised,
        findings=findings_of(
            failures,
            id="wgrad.not_the_product",
            title="dW is not the product of its operands",
            remedy="the GEMM or what wraps it: its kernel, a stale or overwritten operand, a factor, a "
            "rounding in between; keep the operands (capture.rules=[{phase: wgrad, level: tensor}]) and "
            "replay it",
        ),
        failed=len(failures),
        skipped=f"{left} products without elements of their operands (capture.verify_products, or level "
        "tensor)"
        if left
        else ("" if exercised else "no GEMM of a parallel linear was recorded with its operands"),
    )


def _live(facts: RunFacts, rank: int) -> dict[tuple[int, int, str, int], float]:
    return {
        (r.key.step, r.key.microbatch, r.key.fqn, r.key.occurrence): r.value
        for r in facts.of(rank, Phase.WGRAD, Role.RESIDUAL, slot=PRODUCT)
        if r.value is not None and not np.isnan(r.value)
    }


def _of_elements(facts: RunFacts, rank: int, one: Gemm) -> Excess | None:
    """Return the excess of one product; None where elements were not kept, or are not finite."""
    found = [numbers(facts, rank, record) for record in (one.wgrad, one.grad_output, one.received)]
    product, left, right = found
    if product is None or left is None or right is None:
        return None
    left, right = left.reshape(-1, left.shape[-1]), right.reshape(-1, right.shape[-1])
    if product.shape != (left.shape[1], right.shape[1]) or len(left) != len(right):
        return None
    if not all(np.isfinite(values).all() for values in (product, left, right)):
        return None
    precise = facts.run.manifest.get("numerics", {}).get("float32_matmul_precision", "highest") == "highest"
    return excess(
        product,
        left,
        right,
        accumulator=roundoff("float64" if one.wgrad.dtype == "float64" else "float32"),
        result=roundoff(one.wgrad.dtype),
        operands=0.0 if precise else TF32,
        further=_rounded_sum(facts, rank, one, product),
    )


def _rounded_sum(facts: RunFacts, rank: int, one: Gemm, product: Vector) -> np.ndarray:
    """Return by rows what rounding left beside that of dW's own size.

    Of float16 what its subnormals lose; of a fused product what was lost by the sum that it is known from.
    """
    lost = np.full(len(product), 2 * underflow(one.wgrad.dtype) * np.sqrt(product.shape[1]))
    if not one.fused:
        return lost
    sides = [numbers(facts, rank, record) for record in (one.before, one.after)]
    known = [values for values in sides if values is not None]
    if not known:
        return lost
    size = sum(np.linalg.norm(values.reshape(len(values), -1), axis=1) for values in known)
    return np.asarray(lost + 2 * roundoff(one.wgrad.dtype) * size)


def _text(found: Excess) -> str:
    return (
        f"row {found.row} leaves a residual of {found.relative:.2e} of its norm, {found.ratio:.3g} "
        "times the bound on rounding"
    )


@invariant(
    "wgrad.changed_on_the_way",
    holds="dW reaches its parameter with the bits that the GEMM gave it",
    unit="products",
    span=[each_rank()],
)
def wgrad_arrives_as_made(facts: RunFacts) -> Answer:
    """Compare the fingerprint of a GEMM's dW with that of the dW that its parameter got."""
    failures: list[Failure] = []
    exercised, several = 0, 0
    for number, rank in facts.ranks.items():
        for made, came in _links(rank):
            if came is None:
                several += 1
                continue
            exercised += 1
            if made.digest.fingerprint != came.digest.fingerprint:
                failures.append(failure(came, number, *_change(facts, number, made, came)))
    return Answer(
        exercised=exercised,
        findings=findings_of(
            failures,
            id="wgrad.changed_on_the_way",
            title="dW was changed between its GEMM and its parameter",
            remedy="what does the backward of the linear do with dW before it returns it? A cast to a "
            "narrower type and back, a second accumulation and a factor do not belong there",
        ),
        failed=len(failures),
        skipped=f"{several} products of modules that are used more than once in a microbatch"
        if several
        else ("" if exercised else "no dW was recorded both at its GEMM and at its parameter"),
    )


def _links(rank: RankRecords) -> Iterator[tuple[TensorRecord, TensorRecord | None]]:
    """Yield a GEMM's dW with that of its parameter; None where the parameter's is a sum of several."""
    made = [one.wgrad for one in gemms(rank) if not one.fused]
    calls = Counter((r.key.step, r.key.microbatch, r.key.fqn) for r in made)
    came: dict[tuple[int, int, str], list[TensorRecord]] = {}
    for record in rank.records:
        if record.key.phase is Phase.WGRAD and record.key.role is Role.WGRAD:
            came.setdefault((record.key.step, record.key.microbatch, record.key.fqn), []).append(record)
    for record in made:
        key = record.key
        found = came.get((key.step, key.microbatch, f"{key.fqn}.weight"), [])
        if not found:
            continue
        alone = calls[key.step, key.microbatch, key.fqn] == len(found) == 1
        same = alone and (found[0].shape, found[0].dtype) == (record.shape, record.dtype)
        if alone and not same:
            continue  # cast by autograd, as it must be
        yield record, found[0] if alone else None


def _change(facts: RunFacts, rank: int, made: TensorRecord, came: TensorRecord) -> tuple[str, str]:
    """Say how a dW was changed, from elements or from statistics."""
    one, two = numbers(facts, rank, made), numbers(facts, rank, came)
    if one is not None and two is not None and is_finite(made) and is_finite(came):
        square = float(np.vdot(one, one))
        factor = float(np.vdot(one, two)) / square if square else 0.0
        rest = float(np.linalg.norm(two - factor * one) / max(np.linalg.norm(two), 1e-300))
        if rest < 2.0**-6 and _narrow(two, made.dtype) and not _narrow(one, made.dtype):
            return (
                f"{int((one != two).sum())} of {made.numel} elements differ",
                "it was rounded to a narrower type",
            )
        return _named(factor, rest, f"{int((one != two).sum())} of {made.numel} elements differ")
    before, after = made.digest.statistics, came.digest.statistics
    if before is None or after is None or not before.l2_norm:
        return "its bits are others", ""
    factor = after.l2_norm / before.l2_norm
    scale = max(abs(before.minimum), abs(before.maximum)) * abs(factor)
    ends = abs(after.minimum - factor * before.minimum) + abs(after.maximum - factor * before.maximum)
    return _named(
        factor,
        ends / scale if scale else 1.0,
        f"its norm was {before.l2_norm:.6g}, and is {after.l2_norm:.6g}",
    )


def _narrow(values: Vector, dtype: str) -> bool:
    """Tell whether every element fits into a type of 16 bits, though it is kept in a wider one."""
    return roundoff(dtype) <= roundoff("float32") and bool((rounded(values, "bfloat16") == values).all())


def _named(factor: float, rest: float, found: str) -> tuple[str, str]:
    if not factor and not rest:
        return found, "nothing arrived"
    if abs(factor - 1) > 1e-4 and rest < 1e-4:
        return found, f"{factor:.6g} times what the GEMM gave arrived"
    return found, ""


@invariant(
    "wgrad.added_twice",
    holds="a fused GEMM adds the dW of a call to main_grad once",
    unit="fused products",
    span=[each_rank()],
)
def fused_gemm_runs_once(facts: RunFacts) -> Answer:
    """Look for two fused products of one call of one module with operands of the same bits."""
    failures: list[Failure] = []
    exercised = 0
    for number, rank in facts.ranks.items():
        before: tuple[object, ...] = ()
        for one in gemms(rank):
            if not one.fused:
                continue
            exercised += 1
            bits = one.grad_output.digest.fingerprint, one.received.digest.fingerprint
            earlier, before = before, (one.wgrad.key, bits)
            if before == earlier:
                failures.append(
                    failure(one.wgrad, number, "the same operands were multiplied and added before")
                )
    return Answer(
        exercised=exercised,
        findings=findings_of(
            failures,
            id="wgrad.added_twice",
            title="a fused GEMM added one dW to main_grad twice",
            remedy="the backward of this linear, or its recomputation, calls the fused GEMM twice",
        ),
        failed=len(failures),
        applies=exercised > 0,
        skipped="" if exercised else "no fused GEMM was recorded",
    )
