"""Checkpoints that Megatron itself wrote: every format and layout of one training is one model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from preloaded import run_training

from mindspeed_precision.ckpt import open_checkpoint
from mindspeed_precision.records import Severity
from mindspeed_precision.report.examination import examination_status
from mindspeed_precision.testing.demo.arguments import demo_arguments
from mindspeed_precision.testing.demo.launch import SCRIPT

pytestmark = [pytest.mark.matrix, pytest.mark.megatron, pytest.mark.torch]

CORE = Path(__file__).parent / "scripts" / "save_core.py"
SMALL = {"swiglu": True, "rmsnorm": True, "kv_groups": 2, "untie": True, "dtype": "bf16"}
MODEL = ("--swiglu", "--group-query-attention", "--num-query-groups", "2", "--normalization", "RMSNorm")
MODEL += ("--disable-bias-linear", "--add-qkv-bias")


@pytest.fixture(scope="module")
def core(megatron, tmp_path_factory):
    """What megatron.core saved as ``torch_dist``, once for each of the layouts and versions."""
    folder = tmp_path_factory.mktemp("core")

    def save(name, version, processes=1, **asked):
        asked["settings"] = {**SMALL, **asked.get("settings", {})}
        arguments = [str(folder / name), json.dumps(asked)]
        place = {"megatron": megatron(version), "log": folder / f"{name}.txt"}
        run_training(CORE, arguments, processes=processes, **place)
        return folder / name

    found = {"0.12.1": save("old", "0.12.1"), "0.19.2": save("new", "0.19.2")}
    found["tp2"] = save("tp2", "0.19.2", 2, settings={"tp": 2}, load=str(found["0.19.2"]))
    found["buckets"] = save(
        "buckets", "0.17.1", 2, settings={"distributed_optimizer": True}, sharding="dp_reshardable"
    )
    found["values"] = folder / "old.npz"
    return found


@pytest.fixture(scope="module")
def trained(megatron, tmp_path_factory):
    """What ``pretrain`` saved as ``torch``, and what Megatron's own conversion makes of it."""
    folder = tmp_path_factory.mktemp("pretrain")

    def train(name, *extra, processes=1, **settings):
        words = demo_arguments(
            dtype="bf16", iterations=2, untie=True, dropout=0.0, extra=(*MODEL, *extra), **settings
        )
        place = {"megatron": megatron("0.17.1"), "log": folder / f"{name}.txt"}
        run_training(SCRIPT, words, processes=processes, **place)

    one, sharded = folder / "torch", folder / "sharded"
    train("torch", "--save", str(one), "--save-interval", "2", "--ckpt-format", "torch")
    to = ("--ckpt-convert-format", "torch_dist", "--ckpt-convert-save", str(folder / "a"))
    train("dist", "--load", str(one), *to)
    back = ("--ckpt-convert-format", "torch", "--ckpt-convert-save", str(folder / "b"))
    loaded = ("--load", str(folder / "a" / "torch_dist"), "--ckpt-format", "torch_dist")
    train("tp2", *loaded, *back, processes=2, tp=2)
    save = ("--save", str(sharded), "--save-interval", "2", "--ckpt-format", "torch")
    train("sharded", *save, processes=2, distributed_optimizer=True)
    return {
        "torch": one,
        "torch_dist": folder / "a" / "torch_dist",
        "tp2": folder / "b" / "torch",
        "distributed optimizer": sharded,
    }


def answered(examination, findings, outcomes):
    """Return what is said of the parameters, and the ids of errors."""
    errors = {id_ for id_, one in findings.items() if one.severity is Severity.ERROR}
    return {one["outcome"] for one in outcomes.values()}, errors


@pytest.mark.parametrize(("one", "two"), [("0.12.1", "0.19.2"), ("0.19.2", "tp2")])
def test_torch_dist_of_two_versions_and_of_two_layouts(one, two, core, answer):
    examination, findings, outcomes = answer(core[one], core[two])
    assert answered(examination, findings, outcomes) == ({"identical"}, set())
    assert examination_status(examination)[0] == 0
    states = [one for one in examination.outcomes if one.name == "optimizer.state"]
    assert states[0].exercised == 3 * len(outcomes)


def test_torch_dist_against_hugging_face_files_of_the_same(core, answer, tmp_path):
    from checkpoint_files import hosts

    from mindspeed_precision.dump.payload import write_payload

    apart = {}
    values = np.load(core["values"])
    for name in values.files:
        value, own = values[name], name.replace("module.", "")
        stem = own.replace("decoder.layers", "model.layers")
        if "linear_qkv" in own:
            grouped = value.reshape(2, 4, 8, *value.shape[1:])  # two groups: two queries, a key, a value
            for part, rows in (("q", grouped[:, :2]), ("k", grouped[:, 2]), ("v", grouped[:, 3])):
                at = stem.replace("self_attention.linear_qkv", f"self_attn.{part}_proj")
                apart[at] = rows.reshape(-1, *value.shape[1:])
        elif "linear_fc1" in own:
            for part, rows in zip(("gate", "up"), np.split(value, 2), strict=True):
                apart[stem.replace("linear_fc1", f"{part}_proj")] = rows
        else:
            for old, new in (
                ("self_attention.linear_proj", "self_attn.o_proj"),
                ("pre_mlp_layernorm", "post_attention_layernorm"),
                ("linear_fc2", "down_proj"),
                ("embedding.word_embeddings", "model.embed_tokens"),
                ("decoder.final_layernorm", "model.norm"),
                ("output_layer", "lm_head"),
            ):
                stem = stem.replace(old, new)
            apart[stem] = value
    (tmp_path / "hf").mkdir()
    write_payload(tmp_path / "hf" / "model.safetensors", hosts(apart, "bfloat16"))
    config = {"num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    assert answered(*answer(core["0.12.1"], tmp_path / "hf")) == ({"identical"}, set())


def test_buckets_of_a_distributed_optimizer_are_not_passed_over(core, answer):
    found = open_checkpoint(core["buckets"])
    assert found.loose
    assert not found.states
    examination, _, outcomes = answer(core["buckets"], core["buckets"])
    assert {one["outcome"] for one in outcomes.values()} == {"identical"}
    (state,) = [one for one in examination.outcomes if one.name == "optimizer.state"]
    assert (state.exercised, state.skipped) == (len(found.loose), "")
    (state,) = [one for one in answer(core["buckets"], core["0.19.2"])[0].outcomes if one.name == state.name]
    assert state.exercised == 0
    assert state.skipped


@pytest.mark.parametrize("other", ["torch_dist", "tp2"])
def test_what_megatrons_own_conversion_makes_is_the_same(other, trained, answer):
    examination, findings, outcomes = answer(trained["torch"], trained[other])
    assert answered(examination, findings, outcomes) == ({"identical"}, set())
    assert "tensor_model_parallel_size" in str(findings["config.differs"]) or other != "tp2"
    (state,) = [one for one in examination.outcomes if one.name == "optimizer.state"]
    assert (state.exercised, state.failed, state.skipped) == (3 * len(outcomes), 0, "")


def test_buffers_of_a_distributed_optimizer_are_divided(trained, answer):
    """Two data-parallel ranks sum gradients in another order: hardly an element of the moments differs."""
    found = open_checkpoint(trained["distributed optimizer"])
    assert (set(found.states), found.unread) == ({"master_param", "exp_avg", "exp_avg_sq"}, ())
    examination, _, outcomes = answer(trained["torch"], trained["distributed optimizer"])
    assert set(outcomes) == set(open_checkpoint(trained["torch"]).tensors)
    (state,) = [one for one in examination.outcomes if one.name == "optimizer.state"]
    assert state.exercised == 3 * len(outcomes)
    assert "relative" not in examination.headline or "e-" in examination.headline


def test_one_wrong_byte_is_found(trained, answer, tmp_path):
    shutil.copytree(trained["torch"], tmp_path / "bad")
    (file,) = (tmp_path / "bad").rglob("model_optim_rng.pt")
    found = open_checkpoint(trained["torch"])
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    raw = np.ascontiguousarray(found.tensors[name].bits()).tobytes()
    data = bytearray(file.read_bytes())
    place = data.index(raw)
    data[place + 3] ^= 0x10
    file.write_bytes(data)
    _, findings, outcomes = answer(trained["torch"], tmp_path / "bad")
    assert [one for one, told in outcomes.items() if told["outcome"] != "identical"] == [name]
    assert (outcomes[name]["rows"], outcomes[name]["metrics"]["mismatched"]) == ([0], 1)
    assert "weights.differs" in findings
