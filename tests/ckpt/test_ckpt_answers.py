"""What is said of two checkpoints: each way in which they can differ, beside a pair that does not."""

from __future__ import annotations

import json

import numpy as np
import pytest
from checkpoint_files import FFN, HIDDEN, SIZE, VOCABULARY, split_parameters, write_huggingface

from mindspeed_precision.cli import main
from mindspeed_precision.records import Severity
from mindspeed_precision.report.examination import examination_status

K1 = "model.layers.1.self_attn.k_proj.weight"
QKV1 = "decoder.layers.1.self_attention.linear_qkv.weight"
FC2 = "decoder.layers.0.mlp.linear_fc2.weight"


@pytest.fixture(scope="module")
def apart():
    return split_parameters()


@pytest.fixture(scope="module")
def baseline(apart, tmp_path_factory):
    return write_huggingface(tmp_path_factory.mktemp("baseline") / "hf", apart)


@pytest.fixture
def against(baseline, apart, answer, tmp_path):
    """Return a function that changes a copy of the parameters, and compares."""

    def compare(change, **written):
        mine = {name: value.copy() for name, value in apart.items()}
        change(mine)
        return answer(baseline, write_huggingface(tmp_path / "candidate", mine, **written))

    return compare


def test_equal_checkpoints_have_no_finding(against):
    examination, findings, outcomes = against(lambda mine: None)
    assert findings == {}
    assert {one["outcome"] for one in outcomes.values()} == {"identical"}
    assert examination.headline.startswith("IDENTICAL: all")
    assert examination_status(examination) == (0, "")


def test_one_file_or_several_is_the_same(against):
    assert against(lambda mine: None, files=1)[1] == {}


def test_a_few_rows_are_named(against):
    def change(mine):
        mine[K1][4:6] += 0.01

    examination, findings, outcomes = against(change)
    assert set(findings) == {"weights.differs"}
    found = outcomes[f"{QKV1}[k]"]
    assert (found["outcome"], found["rows"]) == ("differs", [4, 5])
    assert found["metrics"]["max_abs"] == pytest.approx(0.01, rel=1e-4)
    assert "in 2 of 8 rows: 4-5" in findings["weights.differs"].evidence[0]
    assert examination_status(examination)[0] == 1


def test_the_worst_comes_first(against):
    def change(mine):
        mine["model.norm.weight"] *= 1 + 1e-3 * np.arange(HIDDEN, dtype=np.float32)
        mine[K1][0] += 5

    examination, findings, _ = against(change)
    assert f"Worst: {QKV1}[k]" in examination.headline
    assert findings["weights.differs"].evidence[0].startswith(QKV1)
    assert [line.split()[0] for line in examination.tables["layers"][1:3]] == [
        "decoder.layers.1",
        "decoder.final_layernorm",
    ]


def test_rows_of_layers_that_are_identical_share_a_line(against):
    def change(mine):
        mine[K1][0] += 5

    lines = against(change)[0].tables["layers"]
    assert lines[-1].startswith("identical in all:")
    assert "decoder.layers.0" in lines[-1]


def test_missing_and_extra(against):
    def change(mine):
        del mine["model.norm.weight"]
        mine["surplus.weight"] = np.zeros(3, np.float32)

    _, findings, outcomes = against(change)
    assert outcomes["decoder.final_layernorm.weight"]["outcome"] == "missing"
    assert outcomes["surplus.weight"]["outcome"] == "extra"
    assert findings["weights.missing"].severity is Severity.ERROR


def test_other_shape(against):
    def change(mine):
        mine["model.norm.weight"] = mine["model.norm.weight"][:-1]

    _, findings, outcomes = against(change)
    assert outcomes["decoder.final_layernorm.weight"]["outcome"] == "other shape"
    assert set(findings) == {"weights.other_shape"}


def test_padded_vocabulary_is_told_from_other_rows(against):
    def shorter(mine):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            mine[name] = mine[name][: VOCABULARY - 4]

    examination, findings, outcomes = against(shorter)
    assert set(findings) == {"config.vocabulary_padding"}
    assert outcomes["output_layer.weight"]["outcome"] == "same after"
    assert examination_status(examination)[0] == 0


def test_padded_vocabulary_does_not_hide_a_difference(against):
    def change(mine):
        mine["lm_head.weight"] = mine["lm_head.weight"][: VOCABULARY - 4].copy()
        mine["lm_head.weight"][3] += 1

    _, findings, outcomes = against(change)
    assert "weights.differs" in findings
    assert outcomes["output_layer.weight"]["rows"] == [3]


def test_tied_weights_are_a_copy_or_a_difference(baseline, apart, answer, tmp_path):
    tied = {name: value for name, value in apart.items() if name != "lm_head.weight"}
    copied = {**apart, "lm_head.weight": apart["model.embed_tokens.weight"]}
    one = write_huggingface(tmp_path / "tied", tied, tie_word_embeddings=True)
    two = write_huggingface(tmp_path / "copied", copied, tie_word_embeddings=True)
    examination, findings, outcomes = answer(one, two)
    assert findings["weights.tied"].severity is Severity.INFO
    assert outcomes["output_layer.weight"]["outcome"] == "same after"
    assert examination_status(examination)[0] == 0
    assert outcomes["output_layer.weight"]["steps"].keys() == {"tied"}
    _, findings, outcomes = answer(one, baseline)
    assert outcomes["output_layer.weight"]["outcome"] == "extra"
    assert "weights.missing" in findings


def test_transposed(against):
    def change(mine):
        mine["model.layers.0.mlp.down_proj.weight"] = np.ascontiguousarray(
            mine["model.layers.0.mlp.down_proj.weight"].T
        )
        mine["model.layers.0.self_attn.o_proj.weight"] = np.ascontiguousarray(
            mine["model.layers.0.self_attn.o_proj.weight"].T
        )

    _, findings, outcomes = against(change)
    assert set(findings) == {"weights.transposed"}
    assert outcomes[FC2]["steps"].keys() == {"transposed"}
    assert "square" in outcomes["decoder.layers.0.self_attention.linear_proj.weight"]["detail"]


def test_scaled(against):
    def change(mine):
        mine["model.layers.0.mlp.down_proj.weight"] *= 0.5

    _, findings, outcomes = against(change)
    assert set(findings) == {"weights.scaled"}
    assert "0.5 times" in outcomes[FC2]["detail"]


def test_another_spread(against):
    def change(mine):
        draw = np.random.default_rng(9).standard_normal((HIDDEN, FFN)).astype(np.float32)
        mine["model.layers.0.mlp.down_proj.weight"] = 0.02 * draw

    assert set(against(change)[1]) == {"weights.other_spread"}


def test_other_numbers_of_one_spread(against):
    def change(mine):
        draw = np.random.default_rng(9).standard_normal((HIDDEN, FFN)).astype(np.float32)
        mine["model.layers.0.mlp.down_proj.weight"] = draw

    assert set(against(change)[1]) == {"weights.differs"}


def test_through_bfloat16_is_an_error_in_one_dtype(against):
    def change(mine):
        for name, value in mine.items():
            mine[name] = _through_bfloat16(value)

    examination, findings, _ = against(change)
    assert set(findings) == {"weights.cast"}
    assert findings["weights.cast"].severity is Severity.ERROR
    assert "the candidate's went through bfloat16" in findings["weights.cast"].evidence[0]
    assert examination_status(examination)[0] == 1


def _through_bfloat16(value):
    from mindspeed_precision.record.elements import to_bits

    return (to_bits(value, "bfloat16").astype(np.uint32) << 16).view(np.float32)


def test_saved_in_bfloat16_is_a_cast_and_no_error(against):
    examination, findings, outcomes = against(lambda mine: None, dtype="bfloat16")
    assert set(findings) == {"weights.cast"}
    assert findings["weights.cast"].severity is Severity.WARNING
    assert {one["outcome"] for one in outcomes.values()} == {"same after"}
    assert examination_status(examination)[0] == 0


def test_a_difference_is_seen_through_a_cast(against):
    def change(mine):
        mine[K1][2] += 0.5

    _, findings, outcomes = against(change, dtype="bfloat16")
    assert "weights.differs" in findings
    assert outcomes[f"{QKV1}[k]"]["outcome"] == "differs"


def test_rotary_pairs(against):
    def change(mine):
        for part in "qk":
            name = f"model.layers.0.self_attn.{part}_proj.weight"
            mine[name] = mine[name].reshape(-1, 2, SIZE // 2, HIDDEN).swapaxes(1, 2).reshape(-1, HIDDEN)

    _, findings, outcomes = against(change)
    assert set(findings) == {"weights.permuted"}
    at = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert "rotary pairs: the candidate's are neighbours" in outcomes[f"{at}[q]"]["detail"]
    assert outcomes[f"{at}[v]"]["outcome"] == "identical"


def test_signs_of_zero_and_nan_are_differences(against):
    def change(mine):
        mine["model.norm.weight"][0] = np.nan

    _, findings, outcomes = against(change)
    assert outcomes["decoder.final_layernorm.weight"]["metrics"]["nonfinite"] == 1
    assert outcomes["decoder.final_layernorm.weight"]["metrics"]["rel_frobenius"] == np.inf
    assert "1 element differs by NaN or infinity; of the others" in findings["weights.differs"].evidence[0]


def test_configuration_is_compared_by_meaning(against):
    examination, findings, _ = against(lambda mine: None, rms_norm_eps=1e-6)
    assert findings["config.differs"].severity is Severity.ERROR
    assert (
        "norm_epsilon: 1e-05 in the baseline, 1e-06 in the candidate"
        in findings["config.differs"].evidence[0]
    )
    assert examination_status(examination)[0] == 1
    assert "Errors beside them: config.differs" in examination.headline


def test_the_command_prints_text_or_json(baseline, apart, tmp_path, capsys):
    other = {**apart, K1: apart[K1] + 1}
    candidate = write_huggingface(tmp_path / "other", other)
    assert main(["ckpt", str(baseline), str(baseline)]) == 0
    out, err = capsys.readouterr()
    assert (out.split(":")[0], err) == ("IDENTICAL", "")
    assert main(["ckpt", str(baseline), str(candidate), "--all"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum(" identical" in line for line in lines) > 10
    assert main(["ckpt", str(baseline), str(candidate), "--json"]) == 1
    plain = json.loads(capsys.readouterr().out)
    assert plain["command"] == "ckpt"
    assert len(plain["parameters"]) == len(apart)
    assert [one["name"] for one in plain["parameters"] if one["outcome"] == "differs"] == [f"{QKV1}[k]"]
