"""The tables of meanings cover what Megatron really has, and say why."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mindspeed_precision.config import data_directory
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.meanings import Effect, load_meanings, read_meanings, without_framework
from mindspeed_precision.records import Severity
from mindspeed_precision.verify.aliases import load_aliases

VERSIONS = ("0.12.1", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
CONFIGS = {
    "core/transformer/transformer_config.py": {"TransformerConfig", "MLATransformerConfig"},
    "core/model_parallel_config.py": {"ModelParallelConfig"},
    "core/distributed/distributed_data_parallel_config.py": {"DistributedDataParallelConfig"},
    "core/optimizer/optimizer_config.py": {"OptimizerConfig", "AdamOptimizerConfig", "SGDOptimizerConfig"},
}
NO_ARGUMENT = {"timers", "layer_number"}
"""Fields of configuration objects that hold an object, or the number of one layer."""


def added_arguments(tree):
    """Yield the destination of every ``add_argument`` and what is set on ``args`` by hand."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            flags = [
                a.value for a in node.args if isinstance(a, ast.Constant) and str(a.value).startswith("-")
            ]
            named = [
                k.value.value for k in node.keywords if k.arg == "dest" and isinstance(k.value, ast.Constant)
            ]
            long = [flag for flag in flags if flag.startswith("--")] or flags
            if named or long:
                yield named[0] if named else long[0].lstrip("-").replace("-", "_")
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "args":
                    yield target.attr


def fields_of(tree, wanted):
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in wanted:
            for entry in node.body:
                if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
                    yield entry.target.id


def generated_from(tree):
    """Yield the classes that ``ArgumentGroupFactory`` makes arguments of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ArgumentGroupFactory":
            yield ast.unparse(node.args[0])


def real_arguments(version: Path):
    found = set()
    for name, classes in CONFIGS.items():
        found |= set(fields_of(ast.parse((version / "megatron" / name).read_text()), classes))
    arguments = version / "megatron" / "training" / "arguments.py"
    if arguments.is_file():
        tree = ast.parse(arguments.read_text())
        found |= set(added_arguments(tree))
        generated = set(generated_from(tree))
        assert generated, "0.16 and later generate arguments from dataclasses"
        for path in (version / "megatron").rglob("*config*.py"):
            found |= set(fields_of(ast.parse(path.read_text()), generated))
    return found - NO_ARGUMENT


@pytest.mark.parametrize(
    "version",
    [pytest.param(v, marks=() if v == VERSIONS[-1] else pytest.mark.matrix) for v in VERSIONS],
)
def test_every_argument_of_megatron_has_a_meaning(megatron, version):
    arguments = real_arguments(megatron(version))
    assert len(arguments) > 200
    assert not arguments - load_meanings().arguments.keys()


def test_meanings_grade_and_give_a_reason():
    tables = load_meanings()
    assert tables.argument("adam_beta2").effect is Effect.CHANGES
    assert tables.argument("overlap_grad_reduce").effect.severity is Severity.WARNING
    assert tables.argument("log_interval").effect.severity is Severity.INFO
    assert tables.argument("reuse_fp32_param").effect is Effect.MAY  # MindSpeed's
    assert tables.argument("no_such_argument") is None
    assert all(len(meaning.reason.split()) > 1 for meaning in tables.arguments.values())


def test_the_first_pattern_of_a_variable_counts():
    tables = load_meanings()
    assert tables.variable("HCCL_DETERMINISTIC").effect is Effect.CHANGES
    assert tables.variable("HCCL_ALGO").effect is Effect.MAY
    assert tables.variable("HCCL_IF_BASE_PORT").effect is Effect.CANNOT
    assert tables.variable("HOME") is None
    assert tables.version("cann").effect is Effect.MAY


def test_aliases_lead_to_arguments_that_have_a_meaning():
    named = {argument for alias in load_aliases().values() for argument in alias.arguments}
    assert named <= load_meanings().arguments.keys()


@pytest.mark.parametrize(
    "text",
    [
        "schema: 1\narguments:\n- {effect: perhaps, reason: because of it, names: lr}\n",
        "schema: 1\narguments:\n- {effect: may, names: lr}\n",
        "schema: 1\narguments:\n- {effect: may, reason: r, judged_by: luck, names: lr}\n",
        "schema: 1\narguments:\n- {effect: may, reason: twice, names: lr min_lr lr}\n",
        "schema: 1\nno_section: []\n",
        "schema: 2\n",
    ],
)
def test_a_table_that_does_not_fit_is_refused(tmp_path, text):
    file = tmp_path / "table.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        read_meanings([file])


def test_tables_are_shipped():
    files = sorted(path.stem for path in (data_directory("configs") / "meanings").glob("*.yaml"))
    assert files == ["aliases", "environment", "forwarded", "megatron", "mindspeed"]


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ("torch._C._nn.gelu", "mindtorch.nn.functional.gelu", True),
        ("torch._C._nn.gelu", "mindtorch.nn.functional.silu", False),
        ("corpus.bin", "other.bin", False),
    ],
)
def test_a_function_has_one_name_in_every_framework_and_a_file_keeps_its_own(one, two, same):
    assert (without_framework(one) == without_framework(two)) is same
