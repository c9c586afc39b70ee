"""Every target exists with a declared signature in every Megatron that its declaration admits, read with ast.

Needs no import of Megatron: the trees are the wheels that ``make test`` installs side by side.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_precision.errors import ConfigError
from mindspeed_precision.patching.against import check_against
from mindspeed_precision.patching.resolve import Outcome

pytestmark = pytest.mark.megatron

ROOT = Path(os.environ.get("MSP_MCORE") or Path(__file__).parents[2] / ".mcore")
TREES = sorted(path.parent for path in ROOT.glob("*/megatron"))
LAYERS = "megatron/core/tensor_parallel/layers.py"
OPTIMIZER = "megatron/core/optimizer/optimizer.py"
NEEDED = (
    LAYERS,
    OPTIMIZER,
    "megatron/core/__init__.py",
    "megatron/core/package_info.py",
    "megatron/core/optimizer_param_scheduler.py",
    "megatron/core/distributed/param_and_grad_buffer.py",
    "megatron/core/distributed/finalize_model_grads.py",
)


def by_name(rows):
    return {row.name: row for row in rows}


def test_the_trees_are_there():
    if "MSP_MCORE" not in os.environ and not ROOT.exists():
        pytest.skip("no Megatron installed side by side; `make test` does")
    assert TREES


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
def test_every_patch_fits_every_version(tree):
    rows = [row for row in check_against([tree]) if row.outcome is not Outcome.ELSEWHERE]
    assert {row.name: row.reason for row in rows if row.outcome is not Outcome.OK} == {}
    names = {row.name for row in rows}
    assert {"linear_backward", "mixed_precision_step", "finalize_grads"} <= names
    # wheels before 0.17 lack megatron.training
    assert {"train_step", "setup", "parse_args"} <= names or not (tree / "megatron/training").is_dir()


@pytest.mark.skipif(not TREES, reason="no Megatron installed side by side")
def test_every_target_is_checked_somewhere():
    rows = [row for tree in TREES for row in check_against([tree])]
    checked = {row.name for row in rows if row.outcome is Outcome.OK}
    of_megatron = {row.name for row in rows if row.target.startswith("megatron.")}
    assert {row.name for row in rows if "legacy" in row.target} == of_megatron - checked  # in no wheel


@pytest.fixture
def spoilt(megatron, tmp_path):
    """A copy of what is patched in megatron-core 0.17.1, and a function that changes a text in it."""
    for name in NEEDED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(megatron("0.17.1") / name, tmp_path / name)

    def change(name, old, new):
        text = (tmp_path / name).read_text("utf-8")
        assert old in text
        (tmp_path / name).write_text(text.replace(old, new), "utf-8")
        return tmp_path

    return tmp_path, change


def test_what_is_no_file_of_a_tree_is_passed_over(spoilt):
    tree, change = spoilt
    core = tree / "megatron" / "core"
    (core / ".#layers.py").symlink_to("somebody@there.1234")  # the lock of an editor
    (core / "circle.py").symlink_to("circle.py")
    os.mkfifo(core / "pipe.py")
    (core / "directory.py").mkdir()
    change(LAYERS, "def backward(ctx, grad_output):", "def backwards(ctx, grad_output):")  # it is looked for
    assert outcomes(tree)["linear_backward"]


def outcomes(tree):
    rows = check_against([tree])
    return {row.name: (row.outcome, row.reason) for row in rows if row.refused}


def test_a_healthy_copy_is_fine(spoilt):
    tree, _ = spoilt
    assert outcomes(tree) == {}


def test_another_parameter(spoilt):
    _, change = spoilt
    tree = change(LAYERS, "def backward(ctx, grad_output):", "def backward(ctx, grad_output, handle):")
    found = outcomes(tree)
    assert found["linear_backward"][0] is Outcome.SIGNATURE
    assert "found (ctx, grad_output, handle) in line" in found["linear_backward"][1]
    assert set(found) == {
        *("linear_backward", "wgrad_contiguous_operands", "wgrad_transposed_operands", "wgrad_contiguous")
    }


def test_a_renamed_method(spoilt):
    _, change = spoilt
    tree = change(
        "megatron/core/optimizer_param_scheduler.py", "def step(self, increment", "def steps(self, increment"
    )
    outcome, reason = outcomes(tree)["schedule_step"]
    assert outcome is Outcome.ABSENT
    assert reason.endswith("has no OptimizerParamScheduler.step; renamed to OptimizerParamScheduler.steps?")


def test_a_moved_class(spoilt):
    tree, _ = spoilt
    (tree / "megatron/core/linears.py").write_text((tree / LAYERS).read_text("utf-8"), "utf-8")
    (tree / LAYERS).unlink()
    outcome, reason = outcomes(tree)["linear_backward"]
    assert outcome is Outcome.ABSENT
    assert reason == (
        "no module megatron.core.tensor_parallel.layers; moved to "
        "megatron.core.linears:LinearWithGradAccumulationAndAsyncCommunication.backward?"
    )


def test_what_is_imported_from_elsewhere_still_fits(spoilt):
    tree, _ = spoilt
    (tree / "megatron/core/tensor_parallel/linears.py").write_text(
        (tree / LAYERS).read_text("utf-8"), "utf-8"
    )
    (tree / LAYERS).write_text("from .linears import LinearWithGradAccumulationAndAsyncCommunication\n")
    assert outcomes(tree) == {}


def test_a_function_under_a_condition_and_an_alias_are_found(spoilt):
    tree, change = spoilt
    name = "megatron/core/distributed/finalize_model_grads.py"
    change(name, "def finalize_model_grads(", "def _finalize(")
    text = (tree / name).read_text("utf-8")
    (tree / name).write_text(
        text + "\ntry:\n    finalize_model_grads = _finalize\nfinally:\n    pass\n", "utf-8"
    )
    assert outcomes(tree) == {}


def test_a_class_that_is_a_value_now(spoilt):
    _, change = spoilt
    tree = change(OPTIMIZER, "class FP32Optimizer(", "FP32Optimizer = None\n\n\nclass Other(")
    outcome, reason = outcomes(tree)["fp32_step"]
    assert outcome is Outcome.ABSENT
    assert "renamed to " in reason


def test_an_inherited_method_is_found(spoilt):
    _, change = spoilt
    tree = change(
        OPTIMIZER,
        "class FP32Optimizer(",
        "class FP32Optimizer(MixedPrecisionOptimizer): ...\n\n\nclass Other(",
    )
    assert outcomes(tree) == {}


def test_another_version_says_what_would_fit(spoilt):
    tree, change = spoilt
    change("megatron/core/package_info.py", "MINOR = 17", "MINOR = 20")
    change(LAYERS, "def backward(ctx, grad_output):", "def backward(ctx, grad_output, handle):")
    found = outcomes(tree)
    assert {outcome for outcome, _ in found.values()} == {Outcome.EXCLUDED}
    assert "found 0.20.1; it would fit; nothing of the group optimizer is left" in found["fp32_step"][1]
    assert "it would not fit: declared for (ctx, grad_output)" in found["linear_backward"][1]


def test_what_is_no_tree_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such source tree"):
        check_against([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match="no package that is patched"):
        check_against([tmp_path])
    (tmp_path / "megatron/core/tensor_parallel").mkdir(parents=True)
    (tmp_path / LAYERS).write_text("def broken(:\n")
    with pytest.raises(ConfigError, match="not readable as Python"):
        check_against([tmp_path])


def test_the_command_imports_nothing_of_the_tree(spoilt):
    _, change = spoilt
    tree = change(LAYERS, "def backward(ctx, grad_output):", "def backward(ctx, grad_output, handle):")
    (tree / "megatron/core/__init__.py").write_text("raise SystemExit('imported')\n")
    command = [
        sys.executable,
        "-m",
        "mindspeed_precision",
        "patches",
        "check",
        "--json",
        "--against",
        str(tree),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stderr
    rows = {row["name"]: row for row in json.loads(ended.stdout)}
    assert rows["linear_backward"]["outcome"] == "signature differs"
    assert rows["fp32_step"]["outcome"] == "ok"
