"""Declarations: what is read, and what each mistake in a file is called."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re

import pytest

from mindspeed_precision.capture.layout_rules import load_file as load_layout_rules_file
from mindspeed_precision.config import data_directory
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.patching.declare import (
    Called,
    Effect,
    load_declarations,
    load_file,
    select,
)
from mindspeed_precision.patching.signatures import parameters_found, parameters_of, parameters_of_ast

GOOD = """
schema: 1
name: toy
requires: ["toy>=1.0"]
patches:
  - name: one
    target: toy.module:Class.method
    wrapper: toy.wrappers:watch
    signature: (self, x)
    requires: ["other<2"]
    effect: observe
    why: because
"""


def write(tmp_path, text, name="toy.yaml"):
    (tmp_path / name).write_text(text)
    return tmp_path / name


def test_read(tmp_path):
    (one,) = load_file(write(tmp_path, GOOD))
    assert (one.name, one.group, one.file) == ("one", "toy", "toy.yaml")
    assert (one.module, one.qualname) == ("toy.module", "Class.method")
    assert one.signatures == ("(self, x)",)
    assert one.requires == ("toy>=1.0", "other<2")
    assert (one.effect, one.called) == (Effect.OBSERVE, Called.STEP)
    assert (one.optional, one.opaque, one.if_loaded, one.any_of) == (False, False, False, "")


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("signature:", "signatur:", "patches[0].signatur"),
        ("    why: because\n", "", "patches[0].why"),
        ("why: because", "why: ' '", "patches[0].why"),
        ("effect: observe", "effect: alter", "patches[0].effect"),
        ("effect: observe", "effect: observe\n    called: never", "patches[0].called"),
        ("effect: observe", "effect: observe\n    optional: perhaps", "patches[0].optional"),
        ("(self, x)", "self, x", "patches[0].signature"),
        ("(self, x)", "[]", "patches[0].signature"),
        ("(self, x)", "[1]", "patches[0].signature"),
        ("(self, x)", "{a: 1}", "patches[0].signature"),
        ('["other<2"]', '["other"]', "patches[0].requires"),
        ('["other<2"]', '["other[x]>1"]', "patches[0].requires"),
        ('["other<2"]', '["!"]', "patches[0].requires"),
        ("toy.module:Class.method", "toy.module.method", "patches[0].target"),
        ("toy.wrappers:watch", "'toy.wrappers:'", "patches[0].wrapper"),
        ("schema: 1", "schema: 2", "schema"),
        ("schema: 1", "", "schema"),
        ("name: toy", "name: other", "name"),
        ("requires:", "require:", "require"),
        (GOOD[1:], "- 1\n- 2\n", "toy.yaml"),
        (GOOD[1:], "a: [\n", "toy.yaml"),
        (GOOD[1:], "", "schema"),
        (GOOD[GOOD.index("  - name") :], "  - 7", "patches[0]"),
        (GOOD[GOOD.index("  - name") :], "  x: 7", "patches"),
        ("name: toy", "name: toy\nname: toy", "toy.yaml"),
    ],
)
def test_mistakes_name_file_and_key(tmp_path, old, new, key):
    assert old in GOOD
    file = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        load_file(file)
    assert str(file) in caught.value.where
    assert key in caught.value.where
    assert "\n" not in str(caught.value)


def test_search_path_and_name_clash(tmp_path):
    write(tmp_path, GOOD)
    shipped = load_declarations()
    every = load_declarations([tmp_path])
    assert [d.name for d in every] == [*(d.name for d in shipped), "one"]
    write(tmp_path, GOOD.replace("name: toy", "name: again"), "again.yaml")
    with pytest.raises(
        ConfigError, match=r"toy\.yaml: one: two patches share a name \(found also in again\.yaml"
    ):
        load_declarations([tmp_path])
    with pytest.raises(ConfigError, match=r"patches\.search_path"):
        load_declarations([tmp_path / "absent"])


def test_select():
    every = load_declarations()
    chosen = select(every, groups=["wgrad"], names=["wgrad_contiguous_operands"])
    assert {d.name for d in chosen} == {"linear_forward", "linear_backward", "wgrad_contiguous_operands"}
    with pytest.raises(ConfigError, match=r"wgradd: no such group of patches .* wgrad"):
        select(every, groups=["wgradd"])
    with pytest.raises(ConfigError, match="no such patch"):
        select(every, names=["wgrad"])


FORMS = [
    "(a, b)",
    "()",
    "(a, /, b)",
    "(a, /)",
    "(a, *, b)",
    "(*, b)",
    "(*args, b, **kwargs)",
    "(a, /, b, *args, c, **kwargs)",
]


@pytest.mark.parametrize("form", FORMS)
def test_the_three_readers_of_parameters_agree(form):
    """Declared text, a syntax tree and a live function give the same names and kinds."""
    source = f"def f{re.sub('b(?=[,)])', 'b: int = 1', form)}: pass"
    namespace = {}
    exec(compile(source, "toy", "exec", dont_inherit=True), namespace)
    expected = parameters_of(form)
    assert parameters_of_ast(ast.parse(source).body[0].args) == expected
    assert parameters_found(namespace["f"]) == expected
    assert f"({', '.join(expected)})" == str(inspect.signature(namespace["f"])).replace("b: int = 1", "b")


def test_shipped_declarations_are_complete():
    for declaration in load_declarations():
        assert declaration.wrapper.startswith("mindspeed_precision."), declaration.name
        assert len(set(map(parameters_of, declaration.signatures))) == len(declaration.signatures), (
            declaration.name
        )
        # Only what a user names in the settings may change bits.
        remedy = declaration.group.startswith("remedies")
        assert remedy == (declaration.effect is Effect.CONSTRAIN), declaration.name


def test_the_readme_is_true(tmp_path):
    """Its examples are a declaration, the one that ships, and rules; its map names every file."""
    readme = (data_directory("patches") / "README.md").read_text()
    example, rules = re.findall(r"```yaml\n(.*?)```", readme, re.DOTALL)
    (rule,) = load_layout_rules_file(write(tmp_path, rules, "mine.yaml"))
    assert rule.classes == ("MyParallelLinear",)
    (shown,) = load_file(write(tmp_path, example, "wgrad.yaml"))
    (shipped,) = select(load_declarations(), names=["linear_backward"])
    assert dataclasses.replace(shown, why="") == dataclasses.replace(shipped, why="")
    for file in data_directory("patches").glob("*.yaml"):
        assert f"`{file.name}`" in readme, file.name
