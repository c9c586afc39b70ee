"""One small model in the formats of several frameworks, each by that framework's own conventions."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import numpy as np

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump.payload import write_payload

LAYERS, HIDDEN, HEADS, GROUPS, SIZE, FFN, VOCABULARY = 2, 16, 4, 2, 4, 24, 32


def split_parameters(seed=1, *, experts=0):
    """Query, key, value, gate and up apart, ``{name: float32}``, by Hugging Face's names."""
    draw = np.random.default_rng(seed)

    def normal(*shape):
        return draw.standard_normal(shape).astype(np.float32)

    found = {"model.embed_tokens.weight": normal(VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        found[f"{at}.input_layernorm.weight"] = normal(HIDDEN)
        for part, rows in (("q", HEADS * SIZE), ("k", GROUPS * SIZE), ("v", GROUPS * SIZE)):
            found[f"{at}.self_attn.{part}_proj.weight"] = normal(rows, HIDDEN)
            found[f"{at}.self_attn.{part}_proj.bias"] = normal(rows)
        found[f"{at}.self_attn.o_proj.weight"] = normal(HIDDEN, HEADS * SIZE)
        found[f"{at}.post_attention_layernorm.weight"] = normal(HIDDEN)
        mlps = [f"{at}.mlp.experts.{number}" for number in range(experts)] or [f"{at}.mlp"]
        if experts:
            found[f"{at}.mlp.gate.weight"] = normal(experts, HIDDEN)
        for mlp in mlps:
            found[f"{mlp}.gate_proj.weight"] = normal(FFN, HIDDEN)
            found[f"{mlp}.up_proj.weight"] = normal(FFN, HIDDEN)
            found[f"{mlp}.down_proj.weight"] = normal(HIDDEN, FFN)
    found["model.norm.weight"] = normal(HIDDEN)
    found["lm_head.weight"] = normal(VOCABULARY, HIDDEN)
    return found


def megatron_parameters(apart):
    """The same under megatron-core's names: query, key and value by group, the gate above the other half."""
    names = {
        "model.embed_tokens": "embedding.word_embeddings",
        "model.norm": "decoder.final_layernorm",
        "lm_head": "output_layer",
    }
    found = {}
    for own, value in apart.items():
        stem, kind = own.rsplit(".", 1)
        name = names.get(stem, stem.replace("model.layers.", "decoder.layers."))
        for old, new in (
            ("self_attn.o_proj", "self_attention.linear_proj"),
            ("post_attention_layernorm", "pre_mlp_layernorm"),
            ("mlp.experts.", "mlp.experts.local_experts."),
            ("mlp.gate", "mlp.router") if stem.endswith("mlp.gate") else ("", ""),
            ("down_proj", "linear_fc2"),
        ):
            name = name.replace(old, new) if old else name
        if stem.endswith("q_proj"):
            parts = [apart[own.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            name = name.replace("self_attn.q_proj", "self_attention.linear_qkv")
            found[f"{name}.{kind}"] = by_group(*parts)
        elif stem.endswith("gate_proj"):
            up = apart[own.replace("gate_proj", "up_proj")]
            found[f"{name.replace('gate_proj', 'linear_fc1')}.{kind}"] = np.concatenate([value, up])
        elif not stem.endswith(("k_proj", "v_proj", "up_proj")):
            found[f"{name}.{kind}"] = value
    return found


def by_group(query, key, value):
    rows = []
    each = HEADS // GROUPS * SIZE
    for group in range(GROUPS):
        rows.append(query[group * each : (group + 1) * each])
        rows += [part[group * SIZE : (group + 1) * SIZE] for part in (key, value)]
    return np.concatenate(rows)


CONFIG = {
    "model_type": "qwen2",
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "intermediate_size": FFN,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}


def hosts(values, dtype="float32"):
    from mindspeed_precision.record.elements import to_bits

    return {name: HostTensor(bits=to_bits(value, dtype), dtype=dtype) for name, value in values.items()}


def write_huggingface(directory: Path, values, *, files=2, dtype="float32", **config) -> Path:
    """A directory as ``save_pretrained`` leaves it: files, an index of several, the configuration."""
    directory.mkdir(parents=True)
    names = list(values)
    told = {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors" if files > 1 else "model.safetensors"
        mine = {name: values[name] for name in names[number::files]}
        write_payload(directory / file, hosts(mine, dtype))
        told |= dict.fromkeys(mine, file)
    if files > 1:
        index = {"metadata": {"total_size": 0}, "weight_map": told}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return directory


def arguments(**more):
    plain = {
        **{"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS},
        **{"group_query_attention": True, "num_query_groups": GROUPS, "ffn_hidden_size": FFN},
        **{"swiglu": True, "norm_epsilon": 1e-5, "untie_embeddings_and_output_weights": True},
        **{"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1},
        **{"expert_model_parallel_size": 1, "bf16": False, "save": "somewhere"},
    }
    return Namespace(**{**plain, **more})


def shard(name, value, rank, ranks):
    """What a tensor-parallel rank has: written out here, not taken from the package."""
    if ranks == 1:
        return value
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return np.split(value, ranks, axis=1)[rank]
    if "linear_fc1" in name:
        return np.concatenate([np.split(half, ranks)[rank] for half in np.split(value, 2)])
    if any(part in name for part in ("linear_qkv", "word_embeddings", "output_layer")):
        return np.split(value, ranks)[rank]
    return value


def write_megatron(
    directory: Path, values, *, tp=1, pp=1, vpp=1, ep=1, iteration=7, convert=None, **more
) -> Path:
    """A checkpoint of Megatron's format ``torch``, by ``torch.save``."""
    import torch

    args = arguments(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_model_parallel_size=ep, **more
    )
    where = directory / f"iter_{iteration:07d}"
    held = LAYERS // (pp * vpp)
    for t, p, e in ((t, p, e) for t in range(tp) for p in range(pp) for e in range(ep)):
        state = {"args": args, "checkpoint_version": 3.0, "iteration": iteration}
        for chunk in range(vpp):
            first = (chunk * pp + p) * held
            mine = _of_stage(values, first, held, last=chunk == vpp - 1 and p == pp - 1)
            mine = {name: shard(name, value, t, tp) for name, value in _of_experts(mine, e, ep).items()}
            tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in mine.items()}
            if convert:
                tensors = {name: convert(name, tensor) for name, tensor in tensors.items()}
            state["model" if vpp == 1 else f"model{chunk}"] = tensors
        stage = f"_{p:03d}" if pp > 1 else ""
        rank = where / f"mp_rank_{t:02d}{stage}{f'_{e:03d}' if ep > 1 else ''}"
        rank.mkdir(parents=True)
        torch.save(state, rank / "model_optim_rng.pt")
    (directory / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")
    return directory


def _of_stage(values, first, held, *, last):
    found = {}
    for name, value in values.items():
        if name.startswith("decoder.layers."):
            layer, rest = name.removeprefix("decoder.layers.").split(".", 1)
            if first <= int(layer) < first + held:
                found[f"decoder.layers.{int(layer) - first}.{rest}"] = value
        elif (name.startswith("embedding") and first == 0) or (last and not name.startswith("embedding")):
            found[name] = value
    return found


def _of_experts(values, rank, ranks):
    found = {}
    for name, value in values.items():
        head, middle, rest = name.partition(".local_experts.")
        if middle and ranks > 1:
            number, rest = rest.split(".", 1)
            total = 1 + max(
                int(other.partition(".local_experts.")[2].split(".")[0])
                for other in values
                if middle in other
            )
            held = total // ranks
            if rank * held <= int(number) < (rank + 1) * held:
                found[f"{head}.local_experts.{int(number) - rank * held}.{rest}"] = value
        else:
            found[name] = value
    return found
