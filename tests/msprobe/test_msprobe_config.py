"""Configurations of msprobe become settings that our own reader takes; each key is answered."""

from __future__ import annotations

import json

import pytest

from mindspeed_precision.cli import main
from mindspeed_precision.config import load_settings
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.msprobe.config import load_config, translate
from mindspeed_precision.records import Level, Phase, RecordKey, Role

GUIDE = {
    "task": "statistics",
    "dump_path": "/data/dump",
    "rank": [0, "2-3"],
    "step": [1],
    "level": "L1",
    "enable_dataloader": False,
    "async_dump": True,
    "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "md5"},
}


def settings_of(plain, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(translate(plain).yaml("config.json"))
    return load_settings(file)


def key(fqn, role=Role.OUTPUT, phase=Phase.FPROP):
    return RecordKey(step=0, microbatch=0, phase=phase, fqn=fqn, role=role)


def test_the_guides_configuration(tmp_path):
    found = settings_of(GUIDE, tmp_path)
    assert str(found.out) == "/data/dump"
    assert (found.ranks.text, found.steps.text) == ("0,2-3", "1")
    assert found.capture.level is Level.STATISTICS
    assert found.capture.batch


def test_every_key_is_answered():
    found = translate({**GUIDE, "risk_level": "ALL", "what": 1, "tensor": {"list": []}})
    told = " ".join([*found.became, *found.without])
    for name in (*GUIDE, "risk_level", "what", "scope", "list", "data_mode", "summary_mode"):
        assert name in told, name
    assert found.without["what"] == "not known"
    assert "level" in found.without


@pytest.mark.parametrize(
    ("task", "mode", "level"),
    [
        ("statistics", "statistics", Level.STATISTICS),
        ("statistics", "md5", Level.STATISTICS),
        ("statistics", "xor", Level.FINGERPRINT),
        ("statistics", ["max", "l2norm"], Level.STATISTICS),
        ("tensor", "statistics", Level.TENSOR),
        ("overflow_check", "statistics", Level.STATISTICS),
    ],
)
def test_how_much_is_kept(tmp_path, task, mode, level):
    plain = {"task": task, "level": "mix", task: {"summary_mode": mode}}
    assert settings_of(plain, tmp_path).capture.level is level


def test_a_list_raises_the_level_of_its_modules(tmp_path):
    names = ["Module.module.decoder.layers.0.mlp.MLP.forward.0", "relu", "Module.module.output_layer"]
    plain = {"task": "tensor", "tensor": {"list": names}}
    capture = settings_of(plain, tmp_path).capture
    assert capture.level_of(key("decoder.layers.0.mlp")) is Level.TENSOR
    assert capture.level_of(key("output_layer")) is Level.TENSOR
    assert capture.level_of(key("decoder.layers.1.mlp")) is Level.FINGERPRINT
    assert any("relu" in name for name in translate(plain).without)


@pytest.mark.parametrize(
    ("mode", "kept", "dropped"),
    [
        (["forward"], key("a"), key("a", Role.GRAD_OUTPUT, Phase.DGRAD)),
        (["backward"], key("a", Role.GRAD_OUTPUT, Phase.DGRAD), key("a")),
        (["input"], key("a", Role.INPUT), key("a")),
        (["output"], key("a"), key("a", Role.INPUT)),
    ],
)
def test_data_mode_drops_the_rest(tmp_path, mode, kept, dropped):
    plain = {"task": "statistics", "statistics": {"data_mode": mode}}
    capture = settings_of(plain, tmp_path).capture
    assert capture.level_of(kept) is Level.STATISTICS
    assert capture.level_of(dropped) is None


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        ({"task": 3}, "no task"),
        ({"task": "statistics", "rank": ["a"]}, "not a list of numbers"),
        ({"task": "statistics", "step": [True]}, "not a list of numbers"),
        ({"task": "statistics", "level": "L9"}, "no such level"),
        ({"task": "statistics", "level": ["L0"]}, "no such level"),
        ({"task": "statistics", "dump_path": 1}, "no directory"),
        ({"task": "statistics", "statistics": {"data_mode": ["sideways"]}}, "no such data_mode"),
        ({"task": "statistics", "statistics": {"list": "relu"}}, "not a list of names"),
    ],
)
def test_what_msprobe_would_refuse_is_refused(plain, said):
    with pytest.raises(ConfigError, match=said):
        translate(plain)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"capture": {}}', "{"])
def test_what_is_no_configuration_is_refused(tmp_path, text):
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError):
        load_config(file)


def test_a_file_of_msprobes_is_taken_for_settings(tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GUIDE))
    assert load_settings(file).ranks.text == "0,2-3"
    told = capsys.readouterr().err
    assert "is a configuration of msprobe" in told
    assert "level: no counterpart" in told


def test_json_settings_of_ours_stay_what_they_are(tmp_path, capsys):
    file = tmp_path / "ours.json"
    file.write_text(json.dumps({"steps": "0-3"}))
    assert load_settings(file).steps.text == "0-3"
    assert not capsys.readouterr().err


def test_the_command_writes_a_file_and_says_what_became_of_each_key(tmp_path, capsys):
    file, out = tmp_path / "config.json", tmp_path / "ours.yaml"
    file.write_text(json.dumps(GUIDE))
    assert main(["msprobe", "config", str(file), "--out", str(out)]) == 0
    assert "no counterpart" in capsys.readouterr().out
    assert load_settings(out).steps.text == "1"
    assert main(["msprobe", "config", str(file), "--out", str(out)]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert main(["msprobe", "config", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["steps"] == "1"
