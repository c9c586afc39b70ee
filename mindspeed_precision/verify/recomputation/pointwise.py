"""Norms, activations between the linears of an MLP, rotary embeddings: what each row gives by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mindspeed_precision.records import TensorRecord
from mindspeed_precision.verify.elements import Vector, roundoff
from mindspeed_precision.verify.recomputation.calls import (
    ModuleCall,
    calls_of,
    elements,
    parameter_before,
)
from mindspeed_precision.verify.recomputation.exact import Exact, Found, Left, summed
from mindspeed_precision.verify.run_facts import RunFacts

_NORMS = frozenset({"LayerNorm", "RMSNorm", "FusedLayerNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"})
_EPSILONS = ("eps", "epsilon", "variance_epsilon")
_MOST = 1 << 20
"""Elements of one call that are computed anew, of an activation: the rest is sampled by rows."""


def norms(facts: RunFacts, rank: int) -> Found:
    """Yield what norms must have given: ``(x - mean) / sqrt(var + eps) w + b``, or ``x / rms w``."""
    for call in calls_of(facts, rank).values():
        if call.kind in _NORMS:
            yield _norm(facts, call)


def _norm(facts: RunFacts, call: ModuleCall) -> Exact | Left:
    epsilon = next((call.values[name] for name in _EPSILONS if name in call.values), None)
    output = call.outputs.get("0")
    x = elements(facts, call.rank, call.received("0", "input", "hidden_states", "x"))
    names = facts.parameters(call.rank)
    weight, bias = (
        elements(facts, call.rank, parameter_before(facts, call.rank, f"{call.fqn}.{name}", call.step))
        if f"{call.fqn}.{name}" in names
        else None
        for name in ("weight", "bias")
    )
    lacks = f"{call.fqn}.weight" in names and weight is None
    if epsilon is None or output is None or x is None or lacks or x.shape != output.shape:
        return Left(what="norms", why="without an epsilon, or elements of input or weight")
    if weight is not None and weight.shape != x.shape[-1:]:
        return Left(what="norms", why="over more than the last dimension")
    centred = call.values.get("zero_centered_gamma")
    if centred is None:
        centred = (facts.config.get("transformer_config") or {}).get("layernorm_zero_centered_gamma")
    scale = 1.0 if weight is None else weight + bool(centred)
    mean = 0.0 if "RMS" in call.kind else x.mean(axis=-1, keepdims=True)
    deviation = np.sqrt(np.square(x - mean).mean(axis=-1, keepdims=True) + float(epsilon))
    exact = (x - mean) / deviation * scale + (0.0 if bias is None else bias)
    unit = roundoff(output.dtype)
    sizes = np.abs(x).mean(axis=-1, keepdims=True) + np.abs(x) * 4
    share = 4 * summed(facts, x.shape[-1])
    allowed = share * sizes / deviation * np.abs(scale) + 4 * unit * np.abs((x - mean) / deviation * scale)
    # where a kernel takes it from mean squares, the variance is off relative to those
    square = np.square(x).mean(axis=-1, keepdims=True)
    allowed = allowed + share * square / np.square(deviation) * np.abs((x - mean) / deviation * scale)
    if bias is not None:
        allowed = allowed + 2 * unit * np.abs(bias)
    return Exact(record=output, numbers=exact, allowed=allowed, of="its input, its weight and its epsilon")


def _gelu(x: Vector) -> Vector:
    return x * 0.5 * (1.0 + _erf(x / math.sqrt(2.0)))


def _tanh_gelu(x: Vector) -> Vector:
    return x * 0.5 * (1.0 + np.tanh(0.79788456 * x * (1.0 + 0.044715 * np.square(x))))


def _silu(x: Vector) -> Vector:
    return x / (1.0 + np.exp(-x))


def _relu(x: Vector) -> Vector:
    return np.maximum(x, 0.0)


def _erf(x: Vector) -> Vector:
    return np.array([math.erf(one) for one in x.reshape(-1)]).reshape(x.shape)


_ACTIVATIONS: dict[str, Callable[[Vector], Vector]] = {
    "gelu": _gelu,
    "silu": _silu,
    "relu": _relu,
    "squared_relu": lambda x: np.square(_relu(x)),
    "quick_gelu": lambda x: x / (1.0 + np.exp(-1.702 * x)),
}


def activations(facts: RunFacts, rank: int) -> Found:
    """Yield what the second linear of an MLP must have received: what the first one gave, activated."""
    calls = calls_of(facts, rank)
    for call in calls.values():
        owner, _, name = call.fqn.rpartition(".")
        if name != "linear_fc2":
            continue
        first = calls.get((call.step, call.microbatch, f"{owner}.linear_fc1", call.occurrence))
        mlp = calls.get((call.step, call.microbatch, owner, call.occurrence))
        if first is not None and mlp is not None and mlp.kind in ("MLP", "SharedExpertMLP"):
            yield _activation(facts, first, mlp, call)


def _activation(facts: RunFacts, first: ModuleCall, mlp: ModuleCall, second: ModuleCall) -> Exact | Left:
    what = "activations of MLPs"
    config = facts.config.get("transformer_config") or {}
    name = str(config.get("activation_func", "")).rpartition(".")[2]
    function = _ACTIVATIONS.get(name)
    if name == "gelu" and config.get("bias_activation_fusion"):
        function = _tanh_gelu  # Megatron's fused kernel is the approximation
    special = [
        k
        for k in ("activation_func_clamp_value", "glu_linear_offset", "use_te_activation_func")
        if config.get(k)
    ]
    record = second.received("0", "input_")
    given = elements(facts, first.rank, first.outputs.get("0"))
    scales = elements(facts, mlp.rank, mlp.received("1", "per_token_scale"))
    if function is None or special:
        return Left(what=what, why=f"of a function that is not known here: {name or 'none'}, {special}")
    if record is None or given is None or elements(facts, second.rank, record) is None:
        return Left(what=what, why="without elements of what the linears gave and received")
    bias = first.values.get("skip_bias_add") and f"{first.fqn}.bias" in facts.parameters(first.rank)
    added: Vector | float = 0.0
    if bias:
        found = elements(
            facts, first.rank, parameter_before(facts, first.rank, f"{first.fqn}.bias", first.step)
        )
        if found is None:
            return Left(what=what, why="whose bias was not recorded with elements")
        added = found
    if given.size > _MOST:
        return Left(what=what, why=f"of more than {_MOST} elements")
    unit = roundoff(record.dtype)
    x = given + added
    off = 2 * unit * (np.abs(given) + np.abs(added))
    if config.get("gated_linear_unit"):
        gate, other = np.split(x, 2, axis=-1)
        gate_off, other_off = np.split(off, 2, axis=-1)
        active = function(gate)
        exact = active * other
        allowed = (2 * gate_off + 8 * unit * (np.abs(active) + np.abs(gate))) * np.abs(other)
        allowed = allowed + np.abs(active) * other_off + 4 * unit * np.abs(exact)
    else:
        exact = function(x)
        slope = 2.0 if name != "squared_relu" else 2 * np.abs(x)
        allowed = slope * off + 8 * unit * (np.abs(exact) + np.abs(x))
    if scales is not None:
        each = scales.reshape(*scales.shape, *([1] * (exact.ndim - scales.ndim)))
        exact, allowed = exact * each, allowed * np.abs(each) + 4 * unit * np.abs(exact * each)
    if exact.size != record.numel:
        return Left(what=what, why="whose shapes do not fit")
    return Exact(
        record=record,
        numbers=exact,
        allowed=allowed,
        of=f"what linear_fc1 gave, by {name} of the configuration",
    )


def rotary_tables(facts: RunFacts, rank: int) -> Found:
    """Yield what tables of rotary angles must hold: position times frequency, each column linear."""
    args = facts.config.get("megatron_args") or {}
    for call in calls_of(facts, rank).values():
        output = call.outputs.get("0")
        if call.kind != "RotaryEmbedding" or output is None:
            continue
        table = elements(facts, call.rank, output)
        what = "rotary tables"
        if table is None or len(output.shape) < 2 or output.shape[0] < 2:
            yield Left(what=what, why="without elements")
        elif facts.ranks[rank].coordinates.cp_size > 1 or any("packed" in slot for slot in call.inputs):
            yield Left(what=what, why="of a part of the positions")
        else:
            yield _angles(output, table, call, args)


def _angles(output: TensorRecord, table: Vector, call: ModuleCall, args: Any) -> Exact:
    flat = table.reshape(table.shape[0], -1)
    frequencies = flat[1] - flat[0]
    half = flat.shape[1] // 2
    base = args.get("rotary_base")
    plain = not call.values.get("rotary_scaling") and not args.get("use_rope_scaling")
    if isinstance(base, (int, float)) and plain and not args.get("rotary_seq_len_interpolation_factor"):
        own = float(base) ** (-np.arange(half) / half)
        frequencies = np.repeat(own, 2) if call.values.get("rotary_interleaved") else np.tile(own, 2)
    elif plain and half > 1 and frequencies[0] > 0 and not call.values.get("rotary_interleaved"):
        ratio = frequencies[half - 1] / frequencies[0]
        own = frequencies[0] * ratio ** (np.arange(half) / (half - 1))
        frequencies = np.tile(own, 2)
    exact = np.arange(table.shape[0])[:, None] * frequencies
    return Exact(
        record=output,
        numbers=exact.reshape(table.shape),
        allowed=np.abs(exact).reshape(table.shape) * 1e-5,
        of="positions times frequencies that fall by one ratio, in float32",
    )


def rotary(facts: RunFacts, rank: int) -> Found:
    """Yield the query and key that core attention must have received: rotated by the table handed in."""
    calls = calls_of(facts, rank)
    for call in calls.values():
        if call.kind not in ("SelfAttention",):
            continue
        core = calls.get((call.step, call.microbatch, f"{call.fqn}.core_attention", call.occurrence))
        table = elements(facts, rank, call.inputs.get("rotary_pos_emb"))
        if core is None or table is None:
            if core is not None and any(slot.startswith("rotary_pos") for slot in call.inputs):
                yield Left(what="rotations", why="with several tables, or without elements")
            continue
        for slot, norm in (("0", "q_layernorm"), ("1", "k_layernorm")):
            before = calls.get((call.step, call.microbatch, f"{call.fqn}.{norm}", call.occurrence))
            record = core.inputs.get(slot)
            given = elements(facts, rank, before.outputs.get("0")) if before is not None else None
            if record is None or given is None or given.size != record.numel or given.ndim != 4:
                yield Left(what="rotations", why="of which query or key before it was not recorded")
                continue
            yield _rotated(facts, call, given, table, record)


def _rotated(
    facts: RunFacts, call: ModuleCall, given: Vector, table: Vector, record: TensorRecord
) -> Exact | Left:
    config = facts.config.get("transformer_config") or {}
    width = table.shape[-1]
    angles = table.reshape(table.shape[0], 1, 1, width)
    if angles.shape[0] != given.shape[0] or width > given.shape[3] or config.get("multi_latent_attention"):
        return Left(what="rotations", why="by a table of another length")
    turned, rest = given[..., :width], given[..., width:]
    if config.get("rotary_interleaved"):
        pairs = np.stack((-turned[..., 1::2], turned[..., ::2]), axis=-1).reshape(turned.shape)
    else:
        one, two = np.split(turned, 2, axis=-1)
        pairs = np.concatenate((-two, one), axis=-1)
    exact = turned * np.cos(angles) + pairs * np.sin(angles)
    unit = roundoff(record.dtype)
    off = (6 * unit + 2.0**-22 * (1 + np.abs(angles))) * (np.abs(turned) + np.abs(pairs))
    return Exact(
        record=record,
        numbers=np.concatenate((exact, rest), axis=-1),
        allowed=np.concatenate((off, np.zeros_like(rest)), axis=-1),
        of="what came before the rotation, and the table of angles",
    )
