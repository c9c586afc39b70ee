"""The model of a shrunk launch: as few layers, heads and experts as show its structure, and as narrow."""

from __future__ import annotations

import re
from math import lcm

from mindspeed_precision.errors import ConfigError
from mindspeed_precision.launches import Arguments
from mindspeed_precision.shrink.change import Changes
from mindspeed_precision.shrink.parallel import Parallel

HEAD = 16
"""Channels of a head: even halves for rotary embeddings, and what fused attention takes on an NPU."""
GRAIN = 16
"""Widths are multiples of it on each rank."""
LARGEST = 10**9
"""The largest size that is taken for one: beyond it somebody slipped."""
_PIECES = re.compile(r"\[\s*([01])\s*\]\s*\*\s*(\d+)")


def up_to_multiple(number: float, of: int) -> int:
    """Return the smallest multiple of ``of`` that is at least ``number``, and at least one of it."""
    return max(1, -(-int(-(-number // 1)) // of)) * of


def shrink_layers(arguments: Arguments, sizes: Parallel, changes: Changes) -> int:
    """Shrink the number of layers; return it."""
    old = arguments.integer("num_layers", 0)
    if old < 1:
        raise ConfigError(
            "no number of layers", where="--num-layers", found=str(arguments.value("num_layers"))
        )
    step = sizes.pp * sizes.chunks
    pattern, dense = _pattern(arguments), arguments.integer("first_k_dense_replace", 0)
    least = 2  # two show a boundary between layers, and a dense one before one with experts
    frequency = arguments.number("moe_layer_freq")
    if isinstance(frequency, int) and frequency > 1:
        least = max(least, frequency)
    new = min(old, up_to_multiple(least, step)) if old >= step else old
    changes.set(
        "num-layers", old, new, f"{step} pipeline stages of at least one layer, at least {least} layers"
    )
    if arguments.has("num_layers_per_virtual_pipeline_stage"):
        per_stage = new // step
        changes.set(
            "num-layers-per-virtual-pipeline-stage",
            arguments.value("num_layers_per_virtual_pipeline_stage"),
            per_stage,
            f"{sizes.chunks} chunks on each pipeline rank, as before",
        )
    _uneven(arguments, changes)
    if pattern:
        first = 1 if pattern[0] == "0" else 0
        text = f"([0]*{first}+[1]*{new - first})" if first else f"([1]*{new})"
        changes.set("moe-layer-freq", arguments.value("moe_layer_freq"), text, "dense first, then experts")
    if dense:
        changes.set("first-k-dense-replace", dense, min(dense, new - 1), "at least one layer with experts")
        if dense > new - 1:
            changes.lost.append(f"{dense} dense layers before the experts: now {new - 1}")
    again = arguments.number("recompute_num_layers")
    if isinstance(again, int):
        changes.set("recompute-num-layers", again, min(again, new // step), "no more than a stage has")
    changes.lost.append(f"growth of differences over {old} layers: now {new}")
    return new


def _pattern(arguments: Arguments) -> str:
    """Return ``0`` and ``1`` per layer where ``--moe-layer-freq`` is a pattern such as ``([0]*3+[1]*58)``."""
    text = str(arguments.value("moe_layer_freq") or "")
    return "".join(kind * int(count) for kind, count in _PIECES.findall(text))


def _uneven(arguments: Arguments, changes: Changes) -> None:
    """Leave out what splits layers unevenly: the few that are left are split evenly."""
    for setting in (
        *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
        *("pipeline_model_parallel_layout", "num_layer_list", "noop_layers"),
    ):
        argument = arguments.last(setting)
        if argument is not None:
            changes.leave_out(
                argument.name, " ".join(argument.values), "the layers that are left split evenly"
            )
            changes.lost.append(f"--{argument.name}: stages of different lengths")
    for setting in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
        if arguments.on(setting):
            name = setting.replace("_", "-")
            changes.leave_out(name, True, "the layers that are left split evenly")
            changes.lost.append(f"--{name}: stages of different lengths")


def shrink_width(arguments: Arguments, sizes: Parallel, changes: Changes) -> int:
    """Shrink heads, hidden size and ffn; return the hidden size."""
    old_heads, old_hidden = _size(arguments, "num_attention_heads"), _size(arguments, "hidden_size")
    heads = _shrink_heads(arguments, sizes, changes, old_heads)
    old_channels = arguments.integer("kv_channels", old_hidden // old_heads)
    channels = min(old_channels, HEAD)
    ratio = old_hidden / (old_heads * old_channels)
    hidden = up_to_multiple(heads * channels * ratio, lcm(GRAIN, sizes.tp, heads if ratio == 1 else 1))
    hidden = min(hidden, old_hidden)
    changes.set("hidden-size", old_hidden, hidden, f"{heads} heads of {channels} channels")
    if arguments.has("kv_channels") or hidden != heads * channels:
        changes.set("kv-channels", arguments.value("kv_channels"), channels, f"heads of {HEAD} channels")
    _shrink_latent(arguments, changes)
    scale = hidden / old_hidden
    for setting, tp in (
        ("ffn_hidden_size", sizes.tp),
        ("moe_ffn_hidden_size", sizes.etp),
        ("moe_shared_expert_intermediate_size", sizes.tp),
    ):
        found = arguments.number(setting)
        if isinstance(found, int):
            new = min(found, up_to_multiple(found * scale, GRAIN * tp))
            changes.set(
                setting.replace("_", "-"), found, new, f"{found / old_hidden:.3g} times the hidden size"
            )
    changes.lost.append(
        f"sums of a GEMM over {old_hidden} channels, and kernels chosen for that size: now {hidden}"
    )
    return hidden


def _size(arguments: Arguments, setting: str) -> int:
    """Return a size that the model must have.

    Raises:
        ConfigError: it is not given, or is no whole number from 1 to ``LARGEST``.
    """
    given, found = arguments.last(setting), arguments.number(setting)
    if isinstance(found, int) and 1 <= found <= LARGEST:
        return found
    raise ConfigError(
        "no size of a model",
        where=f"--{setting.replace('_', '-')}",
        found="it is not given" if given is None else " ".join(given.values),
        expected=f"a whole number from 1 to {LARGEST}",
        remedy="give the size of the model that is to be shrunk",
    )


def _shrink_heads(arguments: Arguments, sizes: Parallel, changes: Changes, old: int) -> int:
    """Shrink heads and query groups with their ratio; return the heads."""
    algorithm = str(arguments.value("context_parallel_algo") or "")
    split = sizes.tp * (sizes.cp if algorithm == "ulysses_cp_algo" else 1)
    groups = arguments.integer("num_query_groups", 1) if arguments.on("group_query_attention") else 0
    if not groups:
        new = min(old, up_to_multiple(2, split))
        changes.set("num-attention-heads", old, new, f"at least two, over {split} ranks")
        return new
    ratio = old // groups
    fewer = groups if groups <= split else min(groups, up_to_multiple(2, split))
    new = min(old, up_to_multiple(fewer * ratio, split))
    changes.set("num-query-groups", groups, fewer, f"over {split} ranks")
    changes.set("num-attention-heads", old, new, f"{ratio} heads to a query group, as before")
    return new


def _shrink_latent(arguments: Arguments, changes: Changes) -> None:
    """Shrink the ranks and heads of latent attention."""
    if not arguments.on("multi_latent_attention"):
        return
    for setting, most in (
        ("q_lora_rank", 2 * HEAD),
        ("kv_lora_rank", 2 * HEAD),
        ("qk_head_dim", HEAD),
        ("qk_nope_head_dim", HEAD),
        ("qk_head_nope_dim", HEAD),
        ("qk_pos_emb_head_dim", HEAD),
        ("qk_rope_head_dim", HEAD),
        ("qk_head_rope_dim", HEAD),
        ("v_head_dim", HEAD),
    ):
        found = arguments.number(setting)
        if isinstance(found, int) and found > most:
            changes.set(setting.replace("_", "-"), found, most, "latent attention of small heads")


def shrink_experts(arguments: Arguments, sizes: Parallel, changes: Changes) -> int:
    """Shrink the number of experts; return it, 0 for a dense model."""
    old = arguments.integer("num_experts", 0)
    if not old:
        return 0
    chosen = arguments.integer("moe_router_topk", 2)
    groups = arguments.integer("moe_router_num_groups", 1)
    step = lcm(sizes.ep, groups)
    least = max(chosen + 1 if old > chosen else chosen, min(2, old // sizes.ep) * sizes.ep, 2 * groups)
    new = min(old, up_to_multiple(least, step))
    changes.set("num-experts", old, new, f"more than the {chosen} that a token takes, over {sizes.ep} ranks")
    if new != old:
        changes.lost.append(f"routing among {old} experts, and the load of each: now {new}")
    return new
