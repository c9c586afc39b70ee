"""Imports follow the flow: ``capture → record → dump ← align ← compare ← diagnose ← report``.

The online half hands records down to the dump; the offline half reads from the dump upwards. Neither reaches
past its neighbours into the other, and no stage imports one that comes after it.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "mindspeed_precision"
COMPUTES = {"torch", "torch_npu", "mindspore"}  # capture sees these through backends.capture_base alone
FRAMEWORKS = {"torch", "torch_npu", "mindspore", "megatron", "mindspeed", "mindspeed_llm"}

# What everybody may import: the seam types, and the definitions of fingerprint and numbers, in numpy alone.
FOUNDATION = {
    "records",
    "errors",
    "config",
    "counting",
    "engines",
    "foreign_yaml",
    "meanings",
    "permissions",
    "progress",
    "redaction",
    "repeats",
    "symptoms",
    "backends.base",
    "backends.capture_base",
    "backends.npu",
    "record.elements",
    "record.fingerprint",
    "record.freivalds",
    "record.merge",
    "record.placement",
    "record.process_group",
    "record.sketch",
    "record.statistics",
}
MAY_IMPORT = {
    "backends": set(),
    "patching": set(),
    "determinism": {"patching", "backends"},  # backends: which framework is loaded
    "capture": {"patching", "record"},
    "record": {"dump"},
    "dump": set(),
    "align": {"dump"},
    "compare": {"dump", "align"},
    "diagnose": {"dump", "align", "compare", "backends"},  # backends: replay asks for one by name
    "fold": {"dump", "align", "compare", "diagnose"},
    "verify": {"dump", "align", "compare"},
    "torch_archive": {"record"},
    "ckpt": {"dump", "align", "compare", "verify", "torch_archive"},
    "launches": {"arguments"},  # arguments: our own flags
    "shrink": {"launches", "preflight", "verify"},
    "live": {"record", "report"},  # report: the bar
    "export": {"dump"},
    "evaluation": set(),
    "samples": {"dump", "verify", "report"},
    "certify": {"dump", "align", "launches", "determinism", "flow"},  # flow: what `compare` is
    "preflight": {"launches", "determinism", "verify"},
    "msprobe": {"dump", "align", "compare", "torch_archive"},
    "report": {
        "dump",
        "align",
        "compare",
        "diagnose",
        "fold",
        "verify",
        "patching",
    },  # patching: `patches list`
}
ANYTHING = {"testing"}  # plays whole runs, so it may touch every stage
NO_FRAMEWORK = {
    *("record", "dump", "align", "compare", "diagnose", "fold", "verify", "report"),
    *("launches", "preflight", "shrink", "certify", "live", "export", "evaluation", "samples", "ckpt"),
    *("msprobe", "torch_archive"),
}


def imported(tree):
    """Yield the dotted names that a module imports, at any depth of nesting, except for type checkers."""
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def violations(stage, source):
    """Return the imports of a module in folder ``stage`` that the table does not allow."""
    found = []
    for name in imported(ast.parse(source)):
        root, _, inner = name.partition(".")
        if root in FRAMEWORKS and (stage in NO_FRAMEWORK or (stage == "capture" and root in COMPUTES)):
            found.append(name)
        if root != "mindspeed_precision":
            continue
        folder = inner.partition(".")[0]
        founded = any(inner == base or inner.startswith(f"{base}.") for base in FOUNDATION)
        if not founded and folder != stage and folder not in MAY_IMPORT[stage]:
            found.append(name)
    return found


def stages():
    return sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists())


def test_every_folder_is_in_the_table():
    assert set(stages()) <= MAY_IMPORT.keys() | ANYTHING


@pytest.mark.parametrize("stage", sorted(MAY_IMPORT))
def test_imports_go_down(stage):
    found = {
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in (PACKAGE / stage).rglob("*.py")
        for name in violations(stage, path.read_text(encoding="utf-8"))
    }
    assert not found


@pytest.mark.parametrize(
    ("stage", "source"),
    [
        ("align", "from mindspeed_precision.compare import verdict"),
        ("align", "def f():\n    import torch"),
        ("capture", "import torch"),
        ("record", "from mindspeed_precision.capture.modules import x"),
        ("dump", "import mindspeed_precision.record.recorder"),
        ("compare", "from mindspeed_precision import capture"),
        ("report", "from torch.utils import data"),
    ],
)
def test_the_guard_can_fail(stage, source):
    assert violations(stage, source)


@pytest.mark.parametrize(
    ("stage", "source"),
    [
        ("align", "from mindspeed_precision.records import Pair"),
        ("compare", "from mindspeed_precision.record.elements import to_numbers"),
        ("dump", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("capture", "from mindspeed_precision.record.recorder import Recorder"),
        ("diagnose", "from mindspeed_precision.diagnose.rules import registry"),
    ],
)
def test_the_guard_lets_pass_what_is_allowed(stage, source):
    assert not violations(stage, source)
