"""A YAML file of another team reads no variable, calls nothing, and is as large as it looks."""

from __future__ import annotations

import json

import pytest
from omegaconf import OmegaConf

from mindspeed_precision.align.mapping import load_mapping
from mindspeed_precision.capture import layout_rules
from mindspeed_precision.compare.policy import load_policy
from mindspeed_precision.config import load_settings
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.foreign_yaml import calls_resolver, read_yaml
from mindspeed_precision.launches import read_launch
from mindspeed_precision.patching import declare
from mindspeed_precision.verify.aliases import read_configuration

SECRET = "hunter2-of-this-machine"
READ = "${oc.env:FOREIGN_SECRET}"
PATCH = """schema: 1
name: file
patches:
  - {{name: one, target: "a:b", wrapper: "a:b", signature: (), effect: observe, why: "{why}"}}
"""
REFUSING = {
    "settings": (load_settings, f"out: {READ}\n"),
    "settings, indirectly": (load_settings, f"out: ${{init_from}}\ninit_from: {READ}\n"),
    "mapping": (load_mapping, f"schema: 1\nnames: [{{from: '{READ}', to: x}}]\n"),
    "policy": (lambda path: load_policy(str(path)), f"schema: 1\nname: '{READ}'\n"),
    "patches": (declare.load_file, PATCH.format(why=READ)),
    "layout rules": (layout_rules.load_file, f"schema: 1\nname: '{READ}'\n"),
}
TEXT = {
    "MindFormers": read_configuration,
    "yaml-cfg": lambda path: read_launch([str(path)], {}).arguments.given,
}


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("FOREIGN_SECRET", SECRET)


@pytest.mark.parametrize("kind", REFUSING)
def test_a_file_that_reads_the_environment_is_refused_by_key(tmp_path, kind):
    read, text = REFUSING[kind]
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="may not read the environment") as caught:
        read(path)
    assert SECRET not in str(caught.value)
    assert str(path) in caught.value.where
    assert READ in caught.value.found


@pytest.mark.parametrize("name", TEXT)
def test_a_launched_configuration_keeps_the_text(tmp_path, name):
    path = tmp_path / "file.yaml"
    path.write_text(f"model:\n  tokenizer_model: '{READ}'\n  seed: 7\n  again: ${{model.tokenizer_model}}\n")
    said = str(TEXT[name](path))
    assert SECRET not in said
    assert READ in said
    assert "7" in said


def test_other_interpolations_are_resolved(tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text(
        "a: 7\nb: ${a}\nc: 'x-${a}-y'\nd: '${oc.env:HOME}'\ne: 'z${d}'\nf: [{g: '${oc.env:HOME}'}]\n"
    )
    assert read_yaml(path) == {
        **{"a": 7, "b": 7, "c": "x-7-y", "d": "${oc.env:HOME}", "e": "z${oc.env:HOME}"},
        "f": [{"g": "${oc.env:HOME}"}],
    }
    path.write_text("out: runs/${label}\nlabel: a\n")
    with pytest.raises(ConfigError, match="label"):  # no such setting; another one works
        load_settings(path)
    path.write_text("out: runs/${determinism.seed}\n")
    assert str(load_settings(path).out) == "runs/1234"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        *((text, True) for text in ("${oc.env:HOME}", "a ${ oc.env:HOME } b", "${${name}:HOME}")),
        *((text, True) for text in ("${a.${b}:c}", "${x}${oc.decode:'1'}", r"\\${oc.env:HOME}")),
        *((text, False) for text in ("", "a:b", "${a}", "http://${host}:80", "${a.b}:${c}", "$ {a:b}")),
    ],
)
def test_what_calls_a_resolver(text, calls):
    assert calls_resolver(text) is calls


@pytest.mark.filterwarnings("ignore::UserWarning")  # the newest OmegaConf has another name for it
def test_no_registered_resolver_runs(tmp_path):
    """What a training script registers is its own program."""
    called = []
    OmegaConf.register_new_resolver("ours_of_a_test", lambda: called.append(1), replace=True)
    path = tmp_path / "file.yaml"
    path.write_text("name: oc.env\nvalue: '${ours_of_a_test:}'\nnested: '${${name}:FOREIGN_SECRET}'\n")
    assert SECRET not in json.dumps(read_yaml(path))
    with pytest.raises(ConfigError):
        load_settings(path)
    assert not called


@pytest.mark.parametrize(
    "read", [load_settings, load_mapping, declare.load_file, read_configuration, TEXT["yaml-cfg"]]
)
def test_aliases_of_aliases_take_no_memory(tmp_path, read):
    rows = ["a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    path = tmp_path / "file.yaml"
    path.write_text("\n".join(rows))
    with pytest.raises(ConfigError, match="aliases"):
        read(path)


def test_a_node_inside_itself_is_refused(tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text("a: &a [*a]\n")
    with pytest.raises(ConfigError, match="aliases"):
        read_configuration(path)


def test_an_alias_is_read(tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text("a: &a [1, 2]\nb: *a\nc: &c {d: 1}\ne: {<<: *c, f: 2}\n")
    assert read_configuration(path) == {"a": [1, 2], "b": [1, 2], "c": {"d": 1}, "e": {"d": 1, "f": 2}}
