"""Parallel linears: ``y = x W^T + b`` and ``dx = dy W``, asked of random signs (``record.freivalds``).

Over a tensor-parallel group the shards of all its ranks are put together: a column-parallel output is the
rank's own, a row-parallel one the sum over the ranks; dx the other way round. Under sequence parallelism what
is gathered is put together along the first dimension, and what is scattered is the rank's part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_precision.record.freivalds import Excess, excess
from mindspeed_precision.records import TensorRecord
from mindspeed_precision.verify.elements import Vector, roundoff
from mindspeed_precision.verify.places import tensor_group
from mindspeed_precision.verify.recomputation.calls import (
    ModuleCall,
    calls_of,
    elements,
    is_plain,
    parameter_before,
)
from mindspeed_precision.verify.recomputation.exact import ACCUMULATOR, Left, underflow
from mindspeed_precision.verify.run_facts import RunFacts

KINDS = frozenset({"ColumnParallelLinear", "RowParallelLinear"})
WHAT = "parallel linears"
_IDENTITIES = frozenset({"IdentityOp", "IdentityFuncOp"})


@dataclass(frozen=True, kw_only=True)
class Product:
    """A record and how far it is from the product that it must be.

    Attributes:
        record: the output, or the gradient of the input.
        excess: of its rows.
        of: what was multiplied, in a phrase.
    """

    record: TensorRecord
    excess: Excess
    of: str


def products(facts: RunFacts, rank: int, *, backward: bool) -> Iterator[Product | Left]:
    """Yield the outputs of parallel linears, or the gradients of their inputs, against their products."""
    if not facts.config.get("transformer_config"):
        return  # whose linears they are, and what else reads their inputs, is not known
    for call in calls_of(facts, rank).values():
        if call.kind not in KINDS:
            continue
        members = _members(facts, call)
        if isinstance(members, str):
            yield Left(what=WHAT, why=members)
        else:
            yield _backward(facts, call, members) if backward else _forward(facts, call, members)


def _members(facts: RunFacts, call: ModuleCall) -> list[ModuleCall] | str:
    """Return this call on every rank of the tensor-parallel group, in its order; or why not."""
    if not is_plain(facts, call):
        return "that have further parameters (an adapter)"
    where = facts.ranks[call.rank].coordinates
    weight = facts.parameters(call.rank).get(f"{call.fqn}.weight")
    split = weight is None or weight.placement is None or bool(weight.placement.splits)
    if where.tp_size == 1 or (call.values.get("is_expert") and not split):
        return [call]
    if call.values.get("is_expert"):
        return "of experts that are split over ranks"
    if call.values.get("gather_output") or call.values.get("input_is_parallel") is False:
        return "with a gather or a scatter of their own"
    alike = [r for r in facts.ranks if tensor_group(facts.ranks[r].coordinates) == tensor_group(where)]
    alike.sort(key=lambda number: facts.ranks[number].coordinates.tp_rank)
    found = [calls_of(facts, number).get(call.moment) for number in alike]
    if len(found) != where.tp_size or None in found:
        return "of which not every rank of the group recorded the call"
    return [one for one in found if one is not None]


def _weight(facts: RunFacts, call: ModuleCall) -> Vector | None:
    record = call.inputs.get("weight") or parameter_before(facts, call.rank, f"{call.fqn}.weight", call.step)
    return elements(facts, call.rank, record)


def _bias(facts: RunFacts, call: ModuleCall) -> Vector | str | None:
    """Return the bias that the linear adds; None: none; a text: it is not known."""
    if call.values.get("skip_bias_add") or f"{call.fqn}.bias" not in facts.parameters(call.rank):
        return None
    bias = elements(facts, call.rank, parameter_before(facts, call.rank, f"{call.fqn}.bias", call.step))
    return "whose bias was not recorded with elements" if bias is None else bias


def _flat(array: Vector) -> Vector:
    return array.reshape(-1, array.shape[-1])


def _gathered(facts: RunFacts, members: Sequence[ModuleCall], side: str) -> list[Vector] | None:
    """Return what each rank had, ``[tokens, size]``; None where a rank kept no elements."""
    records = [getattr(one, side).get("0") for one in members]
    records = [one.inputs.get("input_") if r is None and side == "inputs" else r
               for one, r in zip(members, records, strict=True)]  # fmt: skip
    arrays = [elements(facts, one.rank, r) for one, r in zip(members, records, strict=True)]
    return None if any(array is None for array in arrays) else [_flat(a) for a in arrays if a is not None]


def _forward(facts: RunFacts, call: ModuleCall, members: Sequence[ModuleCall]) -> Product | Left:
    output = call.outputs.get("0")
    given = _gathered(facts, members, "inputs")
    weights = [_weight(facts, one) for one in members]
    bias = _bias(facts, call)
    if isinstance(bias, str):
        return Left(what=WHAT, why=bias)
    found = elements(facts, call.rank, output)
    if output is None or found is None or given is None or any(weight is None for weight in weights):
        return Left(what=WHAT, why="without elements of input, weight or output, or not finite ones")
    kept = [weight for weight in weights if weight is not None]
    mine = members.index(call)
    scattered = bool(call.values.get("sequence_parallel"))
    if call.kind == "ColumnParallelLinear":
        left = np.concatenate(given) if scattered and len(given) > 1 else given[mine]
        right = kept[mine]
    else:  # the ranks' products add up
        left, right = np.concatenate(given, axis=1), np.concatenate(kept, axis=1)
        if scattered and len(members) > 1:
            left = np.split(left, len(members))[mine]
    return _judged(facts, output, found, left, right.T, bias, "its input and its weight")


def _backward(facts: RunFacts, call: ModuleCall, members: Sequence[ModuleCall]) -> Product | Left:
    record = call.grad_inputs.get("0") or call.grad_inputs.get("input_")
    arrived = _gathered(facts, members, "grad_outputs")
    weights = [_weight(facts, one) for one in members]
    why = _other_readers(facts, call)
    if why:
        return Left(what=WHAT, why=why)
    found = elements(facts, call.rank, record)
    if record is None or found is None or arrived is None or any(weight is None for weight in weights):
        return Left(what=WHAT, why="without elements of gradients or weight, or not finite ones")
    kept = [weight for weight in weights if weight is not None]
    mine = members.index(call)
    scattered = bool(call.values.get("sequence_parallel")) and len(members) > 1
    if call.kind == "ColumnParallelLinear":
        left, right = np.concatenate(arrived, axis=1), np.concatenate(kept)
        if scattered:
            left = np.split(left, len(members))[mine]
    else:
        left = np.concatenate(arrived) if scattered else arrived[mine]
        right = kept[mine]
    return _judged(facts, record, found, left, right, None, "the gradient of its output and its weight")


def _other_readers(facts: RunFacts, call: ModuleCall) -> str:
    """Say what else may read the input of a linear, so that its gradient is a sum; empty: nothing does."""
    config = facts.config.get("transformer_config") or {}
    record = call.received("0", "input_")
    if record is None or not record.digest.exact:
        return "whose input was not recorded"
    if config.get("mtp_num_layers") and not call.fqn.startswith("decoder.layers."):
        return "whose input multi-token prediction reads, too"
    readers, makers = _by_bits(facts, call.rank, call.step, call.microbatch)
    bits = record.digest.fingerprint
    others = {
        one.fqn
        for one in readers.get(bits, ())
        if one.fqn != call.fqn and not call.fqn.startswith(f"{one.fqn}." if one.fqn else "")
    }
    if others:
        return "whose input other modules read, too"
    made = {one.kind for one in makers.get(bits, ())}
    if not made - _IDENTITIES and not call.fqn.endswith((".linear_proj", ".linear_fc2")):
        return "" if "experts." in call.fqn else "whose input is no module's output: a residual may read it"
    if config.get("apply_residual_connection_post_layernorm"):
        return "whose input a residual reads, too"
    return ""


_ByBits = dict[int, list[ModuleCall]]


def _by_bits(facts: RunFacts, rank: int, step: int, microbatch: int) -> tuple[_ByBits, _ByBits]:
    """Return the calls of a microbatch by the bits that they received, and by those that they gave."""

    def sort() -> tuple[_ByBits, _ByBits]:
        readers: _ByBits = {}
        makers: _ByBits = {}
        for call in calls_of(facts, rank).values():
            if (call.step, call.microbatch) == (step, microbatch):
                for record in call.inputs.values():
                    readers.setdefault(record.digest.fingerprint, []).append(call)
                for record in call.outputs.values():
                    makers.setdefault(record.digest.fingerprint, []).append(call)
        return readers, makers

    return facts.once(("calls by bits", rank, step, microbatch), sort)


def _judged(
    facts: RunFacts,
    record: TensorRecord,
    found: Vector,
    left: Vector,
    right: Vector,
    bias: Vector | None,
    of: str,
) -> Product | Left:
    """Hold ``found`` against ``left @ right + bias``, ``[tokens, terms] @ [terms, size]``."""
    flat = _flat(found)
    if left.shape[1] != right.shape[0] or flat.shape != (left.shape[0], right.shape[1]):
        return Left(what=WHAT, why="whose shapes are not those of a product")
    if not flat.size or not left.size:
        return Left(what=WHAT, why="that got no tokens")
    unit = roundoff(record.dtype)
    # partial sums over ranks, and of blocks of a kernel, are rounded to the type of the result
    size = np.sqrt(np.square(left) @ np.square(right).sum(axis=1))
    further = 2 * unit * size + 2 * underflow(record.dtype) * np.sqrt(right.shape[1])
    if bias is not None:
        flat = flat - bias
        further = further + 2 * unit * float(np.linalg.norm(bias))
    numerics = facts.run.manifest.get("numerics", {})
    precise = numerics.get("float32_matmul_precision", "highest") == "highest"
    found_excess = excess(
        flat,
        np.ascontiguousarray(left.T),
        right,
        accumulator=roundoff("float64") if record.dtype == "float64" else ACCUMULATOR,
        result=unit,
        operands=0.0 if precise else 2.0**-11,
        further=further,
    )
    return Product(record=record, excess=found_excess, of=of)
