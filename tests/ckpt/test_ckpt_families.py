"""Models whose names mean something beside others: one model by the names of two frameworks is one model.

The names, shapes and orders are those of Hugging Face's classes, of megatron-core's modules (0.16 to 0.19),
and of the converters of Megatron-Bridge (``models/gpt_oss``, ``models/deepseek/common.py``) and MindSpeed-LLM
(``configs/checkpoint/model_cfg.json``, ``linear_qkv``, ``linear_qb``, ``linear_kvb``).
"""

from __future__ import annotations

import numpy as np
import pytest
from checkpoint_files import hosts

from mindspeed_precision.dump.payload import write_payload

HIDDEN, FFN, EXPERTS, Q_LORA, KV_LORA, ROWS = 8, 6, 3, 4, 5, 12


class Draw:
    def __init__(self):
        self._draw = np.random.default_rng(7)

    def __call__(self, *shape):
        return self._draw.standard_normal(shape).astype(np.float32)


def stacked(draw, *, block, router, bias, in_turns, out_in=False, ffn=FFN):
    """Experts along the first dimension: ``[experts, in, out]``, of gpt-oss gate and up in turns."""
    theirs, ours = {f"model.layers.0.{block}.{router}.weight": draw(EXPERTS, HIDDEN)}, {}
    ours["decoder.layers.0.mlp.router.weight"] = theirs[f"model.layers.0.{block}.{router}.weight"]
    kinds = {"weight": (HIDDEN,), **({"bias": ()} if bias else {})}
    made = {"gate_up_proj": [], "down_proj": [], "gate_up_proj_bias": [], "down_proj_bias": []}
    for expert in range(EXPERTS):
        at = f"decoder.layers.0.mlp.experts.local_experts.{expert}"
        for kind, columns in kinds.items():
            gate, up = draw(ffn, *columns), draw(ffn, *columns)
            down = draw(HIDDEN, *(ffn,) * len(columns))
            ours[f"{at}.linear_fc1.{kind}"] = np.concatenate([gate, up])
            ours[f"{at}.linear_fc2.{kind}"] = down
            fused = (
                np.stack([gate, up], 1).reshape(2 * ffn, *columns)
                if in_turns
                else ours[f"{at}.linear_fc1.{kind}"]
            )
            suffix = "_bias" if kind == "bias" else ""
            turn = (lambda value: value) if out_in or suffix else np.transpose
            made[f"gate_up_proj{suffix}"].append(turn(fused))
            made[f"down_proj{suffix}"].append(turn(down))
    theirs |= {
        f"model.layers.0.{block}.experts.{name}": np.stack(values) for name, values in made.items() if values
    }
    return theirs, ours


def gpt_oss(draw):
    """Its experts' hidden size is the model's, so that the shape of ``down_proj`` says nothing."""
    theirs, ours = stacked(draw, block="mlp", router="router", bias=True, in_turns=True, ffn=HIDDEN)
    theirs["model.layers.0.mlp.router.bias"] = ours["decoder.layers.0.mlp.router.bias"] = draw(EXPERTS)
    sinks = draw(4)
    theirs["model.layers.0.self_attn.sinks"] = sinks
    ours["decoder.layers.0.self_attention.core_attention.softmax_offset"] = sinks
    return theirs, ours


def llama4(draw):
    theirs, ours = stacked(draw, block="feed_forward", router="router", bias=False, in_turns=False)
    gate, up, down = draw(FFN, HIDDEN), draw(FFN, HIDDEN), draw(HIDDEN, FFN)
    shared = "model.layers.0.feed_forward.shared_expert"
    theirs |= {
        f"{shared}.gate_proj.weight": gate,
        f"{shared}.up_proj.weight": up,
        f"{shared}.down_proj.weight": down,
    }
    ours["decoder.layers.0.mlp.shared_experts.linear_fc1.weight"] = np.concatenate([gate, up])
    ours["decoder.layers.0.mlp.shared_experts.linear_fc2.weight"] = down
    return {f"language_model.{name}": value for name, value in theirs.items()}, ours


def qwen3_vl_moe(draw):
    theirs, ours = stacked(draw, block="mlp", router="gate", bias=False, in_turns=False)
    return {name.replace("model.", "model.language_model.", 1): value for name, value in theirs.items()}, ours


def rows_first(draw):
    return stacked(draw, block="mlp", router="gate", bias=False, in_turns=False, out_in=True)


def latent(draw, *, layer="model.layers.0", lora=True):
    at = f"{layer}.self_attn"
    first = {f"{at}.q_a_proj.weight": draw(Q_LORA, HIDDEN), f"{at}.q_a_layernorm.weight": draw(Q_LORA),
             f"{at}.q_b_proj.weight": draw(ROWS, Q_LORA)}  # fmt: skip
    second = {f"{at}.kv_a_proj_with_mqa.weight": draw(KV_LORA + 2, HIDDEN),
              f"{at}.kv_a_layernorm.weight": draw(KV_LORA), f"{at}.kv_b_proj.weight": draw(ROWS, KV_LORA),
              f"{at}.o_proj.weight": draw(HIDDEN, ROWS)}  # fmt: skip
    return {**(first if lora else {f"{at}.q_proj.weight": draw(ROWS, HIDDEN)}), **second}


def renamed(theirs, names):
    return {new: theirs[old] for old, new in names.items()}


def _core(layer="decoder.layers.0", own="model.layers.0"):
    at, to = f"{own}.self_attn", f"{layer}.self_attention"
    return {f"{at}.q_a_proj.weight": f"{to}.linear_q_down_proj.weight",
            f"{at}.q_a_layernorm.weight": f"{to}.linear_q_up_proj.layer_norm_weight",
            f"{at}.q_b_proj.weight": f"{to}.linear_q_up_proj.weight",
            f"{at}.kv_a_proj_with_mqa.weight": f"{to}.linear_kv_down_proj.weight",
            f"{at}.kv_a_layernorm.weight": f"{to}.linear_kv_up_proj.layer_norm_weight",
            f"{at}.kv_b_proj.weight": f"{to}.linear_kv_up_proj.weight",
            f"{at}.o_proj.weight": f"{to}.linear_proj.weight"}  # fmt: skip


def deepseek(draw):
    theirs = latent(draw)
    return theirs, renamed(theirs, _core())


def _fuse(ours, fused):
    at = "decoder.layers.0.self_attention"
    parts = [ours.pop(f"{at}.linear_{part}_down_proj.weight") for part in ("q", "kv")]
    return {**ours, f"{at}.{fused}.weight": np.concatenate(parts)}


def deepseek_fused(draw):
    """``linear_qkv_down_proj`` of megatron-core's FusedMLASelfAttention."""
    theirs, ours = deepseek(draw)
    return theirs, _fuse(ours, "linear_qkv_down_proj")


def deepseek_mindspeed(draw):
    """MindSpeed-LLM: ``linear_qkv`` holds both down projections, ``k_layernorm`` is that of the latent."""
    theirs, ours = deepseek(draw)
    names = {"linear_q_up_proj.layer_norm_weight": "q_layernorm.weight",
             "linear_q_up_proj.weight": "linear_qb.weight",
             "linear_kv_up_proj.layer_norm_weight": "k_layernorm.weight",
             "linear_kv_up_proj.weight": "linear_kvb.weight"}  # fmt: skip
    at = "decoder.layers.0.self_attention."
    renames = {f"{at}{old}": f"{at}{new}" for old, new in names.items()}
    return theirs, {renames.get(name, name): value for name, value in _fuse(ours, "linear_qkv").items()}


def deepseek_lite(draw):
    """Without a low rank of the query: ``q_proj``, which elsewhere is a part of ``linear_qkv``."""
    theirs = latent(draw, lora=False)
    names = {old: new for old, new in _core().items() if old in theirs}
    at = "decoder.layers.0.self_attention"
    return theirs, renamed(
        theirs, {**names, "model.layers.0.self_attn.q_proj.weight": f"{at}.linear_q_proj.weight"}
    )


def predicting(draw, *, inner="mtp_model_layer"):
    """Two layers, then one that predicts another token, with copies of embedding and output layer."""
    theirs = {"model.embed_tokens.weight": draw(16, HIDDEN), "lm_head.weight": draw(16, HIDDEN)}
    names = {
        "model.embed_tokens.weight": "embedding.word_embeddings.weight",
        "lm_head.weight": "output_layer.weight",
    }
    for layer, to in ((0, "decoder.layers.0"), (1, "decoder.layers.1"), (2, f"mtp.layers.0.{inner}")):
        own = f"model.layers.{layer}"
        theirs |= latent(draw, layer=own)
        theirs[f"{own}.post_attention_layernorm.weight"] = draw(HIDDEN)
        names |= {
            **_core(to, own),
            f"{own}.post_attention_layernorm.weight": f"{to}.pre_mlp_layernorm.weight",
        }
    around = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "final_layernorm"}
    for old, new in around.items():
        theirs[f"model.layers.2.{old}.weight"] = (
            draw(HIDDEN, 2 * HIDDEN) if old == "eh_proj" else draw(HIDDEN)
        )
        names[f"model.layers.2.{old}.weight"] = f"mtp.layers.0.{new}.weight"
    ours = renamed(theirs, names)
    theirs["model.layers.2.embed_tokens.weight"] = theirs["model.embed_tokens.weight"]
    theirs["model.layers.2.shared_head.head.weight"] = theirs["lm_head.weight"]
    return theirs, ours


def predicting_before_017(draw):
    return predicting(draw, inner="transformer_layer")


def gemma2(draw):
    at, to = "model.layers.0", "decoder.layers.0"
    names = {"input_layernorm": "self_attention.linear_qkv.layer_norm_weight",
             "post_attention_layernorm": "self_attention.linear_proj.post_layernorm.weight",
             "pre_feedforward_layernorm": "mlp.linear_fc1.layer_norm_weight",
             "post_feedforward_layernorm": "mlp.linear_fc2.post_layernorm.weight"}  # fmt: skip
    theirs = {f"{at}.{name}.weight": draw(HIDDEN) for name in names}
    return theirs, {f"{to}.{new}": theirs[f"{at}.{old}.weight"] for old, new in names.items()}


FAMILIES = (
    *(gpt_oss, llama4, qwen3_vl_moe, rows_first, deepseek, deepseek_fused, deepseek_mindspeed, deepseek_lite),
    *(predicting, predicting_before_017, gemma2),
)


def written(path, values):
    write_payload(path, hosts({name: np.ascontiguousarray(value) for name, value in values.items()}))
    return path


@pytest.mark.parametrize("family", FAMILIES, ids=lambda one: one.__name__)
def test_a_model_by_the_names_of_two_frameworks_is_one(family, answer, tmp_path):
    theirs, ours = family(Draw())
    one, two = written(tmp_path / "a.safetensors", theirs), written(tmp_path / "b.safetensors", ours)
    for first, second in ((one, two), (two, one)):
        _, findings, outcomes = answer(first, second)
        copies = {
            name for name in outcomes if name.endswith((".embed_tokens.weight", ".shared_head.head.weight"))
        }
        assert {
            name: p["outcome"] for name, p in outcomes.items() if p["outcome"] != "identical"
        } == dict.fromkeys(copies, "same after")
        assert set(findings) == ({"weights.tied"} if copies else set())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda one: one.__name__)
def test_one_element_of_each_tensor_counts(family, answer, tmp_path):
    """What was not compared, or compared with itself, would not show."""
    theirs, ours = family(Draw())
    one = written(tmp_path / "a.safetensors", theirs)
    for name in list(ours):
        spoilt = {**ours, name: ours[name].copy()}
        spoilt[name].flat[-1] += 1
        _, findings, outcomes = answer(one, written(tmp_path / "b.safetensors", spoilt))
        assert sum(p["outcome"] == "differs" for p in outcomes.values()) == 1, name
        assert "weights.differs" in findings


def test_a_copy_of_the_embedding_that_differs_is_no_copy(answer, tmp_path):
    theirs, ours = predicting(Draw())
    theirs["model.layers.2.embed_tokens.weight"] = theirs["model.embed_tokens.weight"] + 1
    one, two = written(tmp_path / "a.safetensors", theirs), written(tmp_path / "b.safetensors", ours)
    _, findings, outcomes = answer(one, two)
    assert outcomes["mtp.layers.0.embed_tokens.weight"]["outcome"] == "missing"
    assert "weights.missing" in findings


def test_query_and_norms_of_other_models_mean_what_they_meant(answer, tmp_path):
    """The twins: without what makes them another model's, the names are Llama's."""
    draw = Draw()
    parts = {part: draw(4, HIDDEN) for part in "qkv"}
    theirs = {f"model.layers.0.self_attn.{part}_proj.weight": value for part, value in parts.items()}
    theirs["model.layers.0.post_attention_layernorm.weight"] = norm = draw(HIDDEN)
    ours = {"decoder.layers.0.self_attention.linear_qkv.weight": np.concatenate(list(parts.values())),
            "decoder.layers.0.pre_mlp_layernorm.weight": norm}  # fmt: skip
    one, two = written(tmp_path / "a.safetensors", theirs), written(tmp_path / "b.safetensors", ours)
    _, findings, _ = answer(one, two)
    assert "weights.missing" not in findings


def test_numbers_without_dimensions_are_the_same_in_every_format(answer, tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    table = {"bn.num_batches_tracked": torch.tensor(3), "logit_scale": torch.tensor(2.5),
             "network.weight": torch.ones(3, 3)}  # fmt: skip
    torch.save(table, tmp_path / "a.pt")
    save_file(table, tmp_path / "a.safetensors")
    _, findings, outcomes = answer(tmp_path / "a.pt", tmp_path / "a.safetensors")
    assert {p["outcome"] for p in outcomes.values()} == {"identical"}
    assert (len(outcomes), findings) == (3, {})
    save_file({**table, "bn.num_batches_tracked": torch.tensor(4)}, tmp_path / "b.safetensors")
    _, findings, outcomes = answer(tmp_path / "a.pt", tmp_path / "b.safetensors")
    assert outcomes["bn.num_batches_tracked"]["outcome"] == "differs"
