"""One model in every format and layout is one model; a layout that is wrong is not."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoint_files import (
    GROUPS,
    HEADS,
    HIDDEN,
    SIZE,
    megatron_parameters,
    split_parameters,
    write_huggingface,
    write_megatron,
)

from mindspeed_precision.ckpt import open_checkpoint
from mindspeed_precision.dump.payload import write_payload
from mindspeed_precision.records import Severity
from mindspeed_precision.report.examination import examination_status

torch_needed = pytest.mark.torch


@pytest.fixture(scope="module")
def apart():
    return split_parameters()


@pytest.fixture(scope="module")
def huggingface(apart, tmp_path_factory):
    return write_huggingface(tmp_path_factory.mktemp("formats") / "hf", apart)


def identical(outcomes):
    return {one["outcome"] for one in outcomes.values()} == {"identical"}


@torch_needed
@pytest.mark.parametrize(
    "layout", [{}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"vpp": 2}, {"tp": 4}], ids=lambda one: f"{one}"
)
def test_layouts_of_megatron_are_put_together(layout, apart, huggingface, answer, tmp_path):
    megatron = write_megatron(tmp_path / "mg", megatron_parameters(apart), **layout)
    examination, findings, outcomes = answer(megatron, huggingface)
    assert identical(outcomes)
    assert not [one for one in findings.values() if one.severity is not Severity.INFO]
    assert examination_status(examination)[0] == 0


@torch_needed
@pytest.mark.parametrize("layout", [{"ep": 2}, {"ep": 2, "pp": 2}, {"ep": 4}], ids=lambda one: f"{one}")
def test_experts_are_numbered_over_the_model(layout, answer, tmp_path):
    apart = split_parameters(experts=4)
    hf = write_huggingface(tmp_path / "hf", apart, num_experts=4)
    megatron = write_megatron(tmp_path / "mg", megatron_parameters(apart), **layout)
    assert identical(answer(megatron, hf)[2])


@torch_needed
def test_a_wrong_expert_is_named(answer, tmp_path):
    apart = split_parameters(experts=4)
    hf = write_huggingface(tmp_path / "hf", apart)
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    other = {**apart, name: apart[name] + 1}
    megatron = write_megatron(tmp_path / "mg", megatron_parameters(other), ep=2)
    outcomes = answer(hf, megatron)[2]
    different = [name for name, one in outcomes.items() if one["outcome"] != "identical"]
    assert different == ["decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight"]


@torch_needed
def test_blocks_where_megatron_has_groups_are_recognised(apart, huggingface, answer, tmp_path):
    wrong = megatron_parameters(apart)
    for name in [name for name in wrong if "linear_qkv" in name]:
        stem, kind = name.replace("decoder", "model").split(".self_attention.linear_qkv.")
        parts = [apart[f"{stem}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
        wrong[name] = np.concatenate(parts)
    megatron = write_megatron(tmp_path / "mg", wrong)
    examination, findings, outcomes = answer(huggingface, megatron)
    detail = outcomes["decoder.layers.0.self_attention.linear_qkv.weight"]["detail"]
    assert "the candidate's rows are [q; k; v] in blocks" in detail
    assert findings["weights.permuted"].severity is Severity.ERROR
    assert "linear_fc1" not in findings["weights.permuted"].title
    assert examination_status(examination)[0] == 1


@torch_needed
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda one: np.roll(one, len(one) // 2, axis=0), "halves are swapped"),
        (lambda one: one.reshape(2, -1, HIDDEN).swapaxes(0, 1).reshape(-1, HIDDEN), "alternate gate and up"),
        (
            lambda one: one.reshape(2, 2, -1, HIDDEN).swapaxes(0, 1).reshape(-1, HIDDEN),
            "gated shards of 2 ranks were put one after another",
        ),
    ],
    ids=["swapped", "alternating", "shards"],
)
def test_conventions_of_a_gated_mlp(spoil, words, apart, huggingface, answer, tmp_path):
    wrong = megatron_parameters(apart)
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    wrong[name] = spoil(wrong[name])
    _, findings, outcomes = answer(huggingface, write_megatron(tmp_path / "mg", wrong))
    assert set(findings) - {"config.differs"} == {"weights.permuted"}
    assert words in outcomes[name]["detail"]


@torch_needed
def test_shards_of_one_rank_that_differ_are_found(apart, answer, tmp_path):
    good = write_megatron(tmp_path / "good", megatron_parameters(apart), tp=2)
    count = iter(range(1000))

    def convert(name, tensor):
        return tensor + next(count) if name == "decoder.final_layernorm.weight" else tensor

    bad = write_megatron(tmp_path / "bad", megatron_parameters(apart), tp=2, convert=convert)
    _, findings, _ = answer(good, bad)
    assert findings["parallel.replicas_differ"].severity is Severity.ERROR
    assert "mp_rank_00 / mp_rank_01" in findings["parallel.replicas_differ"].evidence[0]
    assert "parallel.replicas_differ" not in answer(good, good)[1]


@torch_needed
def test_a_plain_state_dict_of_torch(apart, huggingface, answer, tmp_path):
    import torch

    file = tmp_path / "model.pt"
    torch.save(
        {"state_dict": {name: torch.from_numpy(value) for name, value in apart.items()}, "epoch": 3}, file
    )
    assert identical(answer(huggingface, file)[2])


@torch_needed
def test_tensors_that_are_views_are_read_as_they_are(answer, tmp_path):
    import torch

    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    torch.save(
        {"a": whole.t(), "b": whole[1:3, ::2], "c": whole[2, 3], "d": whole[:0]}, tmp_path / "views.pt"
    )
    torch.save(
        {
            name: one.contiguous()
            for name, one in {"a": whole.t(), "b": whole[1:3, ::2], "d": whole[:0]}.items()
        }
        | {"c": torch.tensor(15.0)},
        tmp_path / "dense.pt",
    )
    outcomes = answer(tmp_path / "views.pt", tmp_path / "dense.pt")[2]
    assert identical(outcomes)
    assert set(outcomes) == set("abcd")


@torch_needed
def test_element_types_of_torch(tmp_path):
    import torch

    types = ["float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "uint16"]
    types += ["float8_e4m3fn", "float8_e5m2"]
    tensors = {name: torch.tensor([1, 0, 1]).to(getattr(torch, name)) for name in types}
    torch.save(tensors, tmp_path / "types.pt")
    found = open_checkpoint(tmp_path / "types.pt").tensors
    assert {name: one.dtype for name, one in found.items()} == {name: name for name in types}
    for name, one in found.items():
        raw = tensors[name].view(torch.uint8) if tensors[name].dtype != torch.bool else tensors[name]
        assert np.ascontiguousarray(one.bits()).tobytes() == raw.numpy().tobytes()


@torch_needed
def test_an_unknown_class_is_no_reason_to_fail_and_is_not_imported(tmp_path, answer):
    import torch

    torch.save({"model": {"w": torch.ones(2)}, "args": Opaque(), "hook": print}, tmp_path / "odd.pt")
    examination = answer(tmp_path / "odd.pt", tmp_path / "odd.pt")[0]
    assert examination.headline == "IDENTICAL: 1 parameter has the same bits."


class Opaque:
    def __init__(self):
        self.__dict__.update(a=1)

    def __setstate__(self, state):
        raise AssertionError("this was unpickled")


def test_mindformers_names_and_optimizer_prefixes(apart, huggingface, answer, tmp_path):
    mine = {}
    for name, value in apart.items():
        own = name
        for old, new in (
            ("embed_tokens.weight", "tok_embeddings.embedding_weight"),
            (".self_attn.q_proj.", ".attention.wq."),
            (".self_attn.k_proj.", ".attention.wk."),
            (".self_attn.v_proj.", ".attention.wv."),
            (".self_attn.o_proj.", ".attention.wo."),
            (".mlp.gate_proj.", ".feed_forward.w1."),
            (".mlp.down_proj.", ".feed_forward.w2."),
            (".mlp.up_proj.", ".feed_forward.w3."),
            (".input_layernorm.", ".attention_norm."),
            (".post_attention_layernorm.", ".ffn_norm."),
            (".norm.", ".norm_out."),
        ):
            own = own.replace(old, new)
        mine[own] = value
    states = {
        f"{prefix}.{name}": value * 0.1 for name, value in mine.items() for prefix in ("adam_m", "adam_v")
    }
    file = tmp_path / "ms.safetensors"
    from checkpoint_files import hosts

    write_payload(file, hosts({**mine, **states, "global_step": np.ones(1, np.float32)}))
    found = open_checkpoint(file)
    assert (found.family, set(found.states)) == ("mindspore", {"exp_avg", "exp_avg_sq"})
    assert found.rest == {"global_step": 1.0}
    assert identical(answer(huggingface, file)[2])


def test_fused_weights_of_chatglm(apart, huggingface, answer, tmp_path):
    mine = {}
    for name, value in apart.items():
        stem, kind = name.rsplit(".", 1)
        at = stem.replace("model.layers.", "transformer.encoder.layers.").replace(
            "self_attn.", "self_attention."
        )
        if stem.endswith("q_proj"):
            parts = [apart[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            mine[f"{at.replace('q_proj', 'query_key_value')}.{kind}"] = np.concatenate(parts)
        elif stem.endswith("gate_proj"):
            both = [value, apart[name.replace("gate_proj", "up_proj")]]
            mine[f"{at.replace('gate_proj', 'dense_h_to_4h')}.{kind}"] = np.concatenate(both)
        elif not stem.endswith(("k_proj", "v_proj", "up_proj")):
            for old, new in (
                ("o_proj", "dense"),
                ("down_proj", "dense_4h_to_h"),
                ("model.embed_tokens", "transformer.embedding.word_embeddings"),
                ("model.norm", "transformer.encoder.final_layernorm"),
                ("lm_head", "transformer.output_layer"),
            ):
                at = at.replace(old, new)
            mine[f"{at}.{kind}"] = value
    config = {"num_key_value_heads": None, "multi_query_group_num": GROUPS}
    glm = write_huggingface(tmp_path / "glm", mine, **config)
    assert identical(answer(glm, huggingface)[2])


def test_heads_that_nobody_states_are_found_by_trying(apart, answer, tmp_path):
    fused = megatron_parameters(apart)
    from checkpoint_files import hosts

    write_payload(tmp_path / "mine.safetensors", hosts(fused))
    write_payload(tmp_path / "hf.safetensors", hosts(apart))
    _, findings, outcomes = answer(tmp_path / "mine.safetensors", tmp_path / "hf.safetensors")
    detail = outcomes["decoder.layers.0.self_attention.linear_qkv.weight"]["detail"]
    assert f"{HEADS} heads, {GROUPS} groups" in detail
    assert "the number of heads is not known" in detail
    assert set(findings) == {"weights.permuted"}
    assert SIZE == 4


def test_a_mapping_file_names_what_no_table_knows(apart, huggingface, answer, tmp_path):
    mine = {name.replace("model.norm", "tail.scale"): value for name, value in apart.items()}
    other = write_huggingface(tmp_path / "other", mine)
    assert "weights.missing" in answer(huggingface, other)[1]
    file = tmp_path / "names.yaml"
    file.write_text(
        "schema: 1\nside: candidate\nnames:\n  - {from: tail.scale, to: decoder.final_layernorm}\n"
    )
    examination, findings, outcomes = answer(huggingface, other, mapping=[file])
    assert identical(outcomes)
    assert findings == {}
    assert examination_status(examination)[0] == 0
