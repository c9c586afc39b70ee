"""Every target exists with a declared signature in every Megatron that its declaration admits, read with ast.

Needs no import of Megatron: the trees are the wheels that ``make test`` installs side by side.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import re
from pathlib import Path

import pytest
from packaging.version import Version

from mindspeed_precision.patching.declare import PatchDeclaration, load_declarations, parse_requirement
from mindspeed_precision.patching.signatures import parameters_of, parameters_of_ast

pytestmark = pytest.mark.megatron

ROOT = Path(os.environ.get("MSP_MCORE") or Path(__file__).parents[2] / ".mcore")
TREES = sorted(path.parent for path in ROOT.glob("*/megatron"))
MEGATRON = [d for d in load_declarations() if d.module.startswith("megatron.")]


def version_of(tree: Path) -> Version:
    text = (tree / "megatron/core/package_info.py").read_text()
    return Version(".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE)))


def admits(declaration: PatchDeclaration, version: Version) -> bool:
    requirements = map(parse_requirement, declaration.requires)
    return all(r.specifier.contains(version) for r in requirements if r.name == "megatron.core")


def ships(tree: Path, declaration: PatchDeclaration) -> bool:
    """Tell whether the tree has the target's package: wheels before 0.17 lack megatron.training."""
    return (tree / Path(*declaration.module.split(".")[:2])).is_dir()


def problem(tree: Path, declaration: PatchDeclaration) -> str:
    """Return what is wrong with ``declaration`` in ``tree``, or nothing."""
    file = tree.joinpath(*declaration.module.split(".")).with_suffix(".py")
    if not file.exists():
        return "" if declaration.optional else f"no module {declaration.module}"
    node: ast.AST | None = ast.parse(file.read_text())
    for name in declaration.qualname.split("."):
        body = getattr(node, "body", [])
        node = next((child for child in body if getattr(child, "name", None) == name), None)
    if not isinstance(node, ast.FunctionDef):
        return f"no {declaration.qualname}"
    found = parameters_of_ast(node.args)
    return "" if found in map(parameters_of, declaration.signatures) else f"found ({', '.join(found)})"


def test_the_trees_are_there():
    if "MSP_MCORE" not in os.environ and not ROOT.exists():
        pytest.skip("no Megatron installed side by side; `make test` does")
    assert TREES


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
@pytest.mark.parametrize("declaration", MEGATRON, ids=lambda declaration: declaration.name)
def test_target_exists(tree, declaration):
    if not admits(declaration, version_of(tree)) or not ships(tree, declaration):
        pytest.skip("not for this version")
    assert problem(tree, declaration) == ""


@pytest.mark.skipif(not TREES, reason="no Megatron installed side by side")
@pytest.mark.parametrize(
    "name", [d.name for d in MEGATRON if "legacy" not in d.module]
)  # megatron.legacy is in no wheel
def test_every_target_is_checked_somewhere(name):
    (declaration,) = (d for d in MEGATRON if d.name == name)
    modules = [tree.joinpath(*declaration.module.split(".")).with_suffix(".py") for tree in TREES]
    assert any(
        file.exists() and admits(declaration, version_of(tree))
        for file, tree in zip(modules, TREES, strict=True)
    )


@pytest.mark.skipif(not TREES, reason="no Megatron installed side by side")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"signatures": ("(ctx, grad_output, handle)",)}, "found (ctx, grad_output)"),
        ({"target": "megatron.core.tensor_parallel.layers:Gone.backward"}, "no Gone.backward"),
        ({"target": "megatron.core.tensor_parallel.gone:f"}, "no module megatron.core.tensor_parallel.gone"),
    ],
)
def test_the_guard_can_fail(change, message):
    (backward,) = (d for d in MEGATRON if d.name == "linear_backward")
    broken = dataclasses.replace(backward, **change)
    assert [problem(tree, broken) for tree in TREES] == [message] * len(TREES)
