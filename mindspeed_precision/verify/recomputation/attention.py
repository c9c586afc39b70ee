"""Attention from query, key, value and mask, and its three gradients, in float64 with a running bound.

``P = softmax(scale q k^T)``, ``o = P v``; ``dV = P^T dO``, ``dP = dO V^T``, ``dS = P (dP - rowsum(P dP))``,
``dQ = scale dS K``, ``dK = scale dS^T Q``. Bounds follow the operations: a product of K terms may be off by
``growth(K)`` of the product of the absolute values and by one rounding of its type, and an error e of the
scores makes one of ``e + max e`` (relative) of the probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.records import TensorRecord
from mindspeed_precision.verify.elements import Vector, roundoff
from mindspeed_precision.verify.recomputation.calls import ModuleCall, calls_of, elements, is_plain
from mindspeed_precision.verify.recomputation.exact import Exact, Found, Left, distance, summed, underflow
from mindspeed_precision.verify.run_facts import RunFacts

KINDS = frozenset({"DotProductAttention", "TEDotProductAttention"})
WHAT = "core attention"
MOST = 1 << 26
"""Scores of one call above which it is left out: ten copies of them are held in float64."""


@dataclass(frozen=True, kw_only=True)
class _Operands:
    """Of one call: ``q [b, h, s, d]``, ``k [b, h, t, d]``, ``v [b, h, t, e]``, of so many groups."""

    q: Vector
    k: Vector
    v: Vector
    groups: int
    scale: float
    unit: float
    floor: float
    """What one rounding may leave whatever the number's size is: float16 has few exponents."""


@dataclass(frozen=True, kw_only=True)
class _Forward:
    """``P [b, h, s, t]`` and ``o [b, h, s, e]``, with what each may be off by (of P: relative)."""

    probabilities: Vector
    relative: Vector
    output: Vector
    allowed: Vector


def attention(facts: RunFacts, rank: int, *, backward: bool) -> Found:
    """Yield what core attention must have given, or the gradients that it must have sent back.

    Args:
        facts: the run.
        rank: whose calls.
        backward: gradients instead of outputs.
    """
    for call in calls_of(facts, rank).values():
        if call.kind in KINDS:
            yield from _of_call(facts, call, backward=backward)


def _of_call(facts: RunFacts, call: ModuleCall, *, backward: bool) -> Found:
    why = _unlike(facts, call)
    given = [call.received(*names) for names in (("0", "query"), ("1", "key"), ("2", "value"))]
    arrays = [elements(facts, call.rank, record) for record in given]
    output = call.outputs.get("0")
    if why or output is None or given[0] is None:
        yield Left(what=WHAT, why=why or "not all of it was recorded")
        return
    q, k, v = arrays
    found = elements(facts, call.rank, output)
    if q is None or k is None or v is None or found is None:
        yield Left(what=WHAT, why="no elements of query, key, value or output were kept, or not finite ones")
        return
    operands = _operands(facts, q, k, v, given[0])
    if operands is None or q.shape[0] * k.shape[0] * q.shape[1] * q.shape[2] > MOST:
        yield Left(what=WHAT, why="of another shape than [s, b, heads, d], or too large")
        return
    candidates = [_forward(facts, operands, mask) for mask in _masks(facts, call, q, k)]
    exacts = [_exact_output(output, one) for one in candidates]
    best = min(range(len(exacts)), key=lambda index: distance(found, exacts[index]).ratio)
    if not backward:
        yield exacts[best]
        return
    arrived = elements(facts, call.rank, call.grad_outputs.get("0"))
    if arrived is None:
        yield Left(what=WHAT, why="no gradient of its output was recorded with elements")
        return
    yield from _gradients(facts, call, operands, candidates[best], arrived)


def _unlike(facts: RunFacts, call: ModuleCall) -> str:
    """Say why a call is not plain attention; empty: it is."""
    config = facts.config.get("transformer_config") or {}
    if not config:
        return "no configuration of the model was recorded"
    if not is_plain(facts, call):
        return "it has parameters of its own"
    if facts.ranks[call.rank].coordinates.cp_size > 1:
        return "context parallelism splits the sequence"
    if config.get("multi_latent_attention"):
        return "latent attention has a scale of its own"
    if config.get("window_size") or config.get("softmax_type", "vanilla") not in ("vanilla", None):
        return "it has a window, or another softmax"
    if config.get("attention_dropout") and not _zeroed(facts):
        return "dropout is on"
    args = facts.config.get("megatron_args") or {}
    if args.get("reset_attention_mask") or args.get("variable_seq_lengths"):
        return "samples in one sequence are told apart by lengths that are kept elsewhere"
    if config.get("qk_clip") or "packed_seq_params.qkv_format" in call.inputs:
        return "queries are clipped, or sequences packed"
    return "sequences are packed" if any("packed" in slot for slot in call.inputs) else ""


def _zeroed(facts: RunFacts) -> bool:
    settings = facts.run.manifest.get("settings")
    pins = settings.get("determinism", {}) if isinstance(settings, dict) else {}
    return bool(pins.get("enabled", False) and pins.get("zero_dropout", False))


def _operands(facts: RunFacts, q: Vector, k: Vector, v: Vector, record: TensorRecord) -> _Operands | None:
    shapes = [array.shape for array in (q, k, v)]
    if {len(shape) for shape in shapes} != {4}:
        return None
    heads, groups = q.shape[2], k.shape[2]
    fits = k.shape[:3] == v.shape[:3] and q.shape[1] == k.shape[1] and q.shape[3] == k.shape[3]
    if not fits or not groups or heads % groups:
        return None
    scale = (facts.config.get("transformer_config") or {}).get("softmax_scale") or 1 / math.sqrt(q.shape[3])
    q, k, v = (np.moveaxis(array, 0, 2) for array in (q, k, v))  # [b, heads, s, d]
    k, v = (np.repeat(array, heads // groups, axis=1) for array in (k, v))
    return _Operands(
        q=q,
        k=k,
        v=v,
        groups=groups,
        scale=float(scale),
        unit=roundoff(record.dtype),
        floor=underflow(record.dtype),
    )


def _masks(facts: RunFacts, call: ModuleCall, q: Vector, k: Vector) -> Iterator[NDArray[np.bool_] | None]:
    """Yield what may be masked out ``[…, s, t]``; True: not attended to.

    The mask that the softmax was given counts, where it was seen: attention may hide more than it was told
    (of samples in one sequence, by lengths kept elsewhere), but must not show what it was told to hide. Else
    the one that was handed in counts; where none was, a causal one or none may be meant.
    """
    causal = np.triu(np.ones((q.shape[0], k.shape[0]), bool), k.shape[0] - q.shape[0] + 1)
    given = _as_mask(facts, call, call.received("3", "attention_mask"), causal.shape)
    inner = calls_of(facts, call.rank).get(
        (call.step, call.microbatch, f"{call.fqn}.scale_mask_softmax", call.occurrence)
    )
    used = None if inner is None else _as_mask(facts, call, inner.received("1", "mask"), causal.shape)
    if used is not None and (given is None or not (given & ~used).any()):
        given = used
    if given is None:
        yield causal
        yield None
        return
    yield given
    if not given.any():
        yield causal


def _as_mask(
    facts: RunFacts, call: ModuleCall, record: TensorRecord | None, shape: tuple[int, int]
) -> NDArray[np.bool_] | None:
    """Return a mask of booleans over queries and keys; None: it is none."""
    mask = elements(facts, call.rank, record)
    if mask is None or record is None or record.dtype != "bool" or mask.ndim != 4:
        return None
    return mask.astype(bool) if mask.shape[-2:] == shape else None


def _forward(facts: RunFacts, one: _Operands, mask: NDArray[np.bool_] | None) -> _Forward:
    q, k, v, u = one.q, one.k, one.v, one.unit
    scores = one.scale * q @ np.swapaxes(k, 2, 3)
    error = summed(facts, q.shape[3]) * one.scale * np.abs(q) @ np.swapaxes(np.abs(k), 2, 3)
    error = error + 3 * u * np.abs(scores)
    if mask is not None:
        hidden = np.broadcast_to(mask, scores.shape)
        scores = np.where(hidden, -np.inf, scores)
        scores = np.where(np.isinf(scores).all(axis=-1, keepdims=True), 0.0, scores)  # uniform, as -10000 is
        error = np.where(hidden, 0.0, error)
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p = powers / powers.sum(axis=-1, keepdims=True)
    relative = np.expm1(np.minimum(error + error.max(axis=-1, keepdims=True), 50.0)) + 6 * u
    relative = relative + summed(facts, k.shape[2])
    output = p @ v
    weights, sizes = p, np.abs(v)
    allowed = (relative * weights) @ sizes + (summed(facts, k.shape[2]) + 2 * u) * (weights @ sizes)
    return _Forward(
        probabilities=p, relative=relative, output=output, allowed=allowed + 2 * u * np.abs(output)
    )


def _exact_output(record: TensorRecord, one: _Forward) -> Exact:
    def shaped(array: Vector) -> Vector:  # [b, h, s, e] to [s, b, h e]
        return np.moveaxis(array, 2, 0).reshape(record.shape)

    return Exact(
        record=record,
        numbers=shaped(one.output),
        allowed=shaped(one.allowed),
        of="softmax(scale q k^T) v",
    )


def _gradients(
    facts: RunFacts, call: ModuleCall, one: _Operands, forward: _Forward, arrived: Vector
) -> Iterator[Exact]:
    p, relative, u = forward.probabilities, forward.relative, one.unit
    b, h, s, _ = one.q.shape
    out = np.moveaxis(arrived.reshape(s, b, h, -1), 0, 2)
    sizes = np.abs(out)
    keys, width = one.k.shape[2], out.shape[3]
    dv = np.swapaxes(p, 2, 3) @ out
    dv_off = np.swapaxes(p * (relative + summed(facts, s) + 2 * u) + one.floor, 2, 3) @ sizes
    dp = out @ np.swapaxes(one.v, 2, 3)
    dp_off = (summed(facts, width) + 2 * u) * (sizes @ np.swapaxes(np.abs(one.v), 2, 3)) + one.floor
    row = (p * dp).sum(axis=-1, keepdims=True)
    row_off = (p * (relative * np.abs(dp) + dp_off)).sum(axis=-1, keepdims=True)
    row_off = row_off + (summed(facts, keys) + 2 * u) * (p * np.abs(dp)).sum(axis=-1, keepdims=True)
    row_off = row_off + 2 * u * (sizes * np.abs(forward.output)).sum(axis=-1, keepdims=True)
    ds = p * (dp - row)
    ds_off = p * ((relative + 4 * u) * np.abs(dp - row) + dp_off + row_off)
    ds_off = ds_off + one.floor * (2 + np.abs(dp - row))  # of the probabilities, too
    share = summed(facts, max(s, keys)) + 4 * u
    dq = one.scale * ds @ one.k
    dq_off = one.scale * (ds_off + share * np.abs(ds)) @ np.abs(one.k)
    dk = one.scale * np.swapaxes(ds, 2, 3) @ one.q
    dk_off = one.scale * np.swapaxes(ds_off + share * np.abs(ds), 2, 3) @ np.abs(one.q)
    for names, exact, off, shared in (
        (("0", "query"), dq, dq_off, h),
        (("1", "key"), dk, dk_off, one.groups),
        (("2", "value"), dv, dv_off, one.groups),
    ):
        record = next((call.grad_inputs[name] for name in names if name in call.grad_inputs), None)
        if record is not None:
            yield _exact_gradient(record, exact, off + 2 * u * np.abs(exact) + one.floor, shared, names[1])


def _exact_gradient(record: TensorRecord, exact: Vector, allowed: Vector, groups: int, name: str) -> Exact:
    """Sum over the heads that share a group, and order as the record: ``[s, b, groups, d]``."""

    def shaped(array: Vector) -> Vector:
        b, h, s, d = array.shape
        return np.moveaxis(array.reshape(b, groups, h // groups, s, d).sum(axis=2), 2, 0)

    return Exact(
        record=record,
        numbers=shaped(exact),
        allowed=shaped(allowed),
        of=f"query, key, value and the gradient of the output ({name})",
    )
