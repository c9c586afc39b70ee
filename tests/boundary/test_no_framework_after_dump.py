"""Nothing after the dump loads a framework: a user compares on a laptop."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mindspeed_precision"
OFFLINE = (
    *("dump", "align", "compare", "diagnose", "fold", "verify", "report"),
    *(
        "launches",
        "preflight",
        "shrink",
        "certify",
        "ckpt",
        "msprobe",
        "export",
        "evaluation",
        "samples",
        "torch_archive",
    ),
)
FRAMEWORKS = ("torch", "torch_npu", "mindspore", "megatron", "mindspeed", "mindspeed_llm")

PROGRAM = """
import importlib, sys
for name in sys.argv[2:]:
    importlib.import_module(name)
loaded = sorted(set(sys.argv[1].split(",")) & {name.partition(".")[0] for name in sys.modules})
print(",".join(loaded))
"""


def offline_modules():
    """Every module of the offline folders, and the commands: whatever exists."""
    paths = [path for folder in OFFLINE for path in (PACKAGE / folder).rglob("*.py")]
    paths += [path for name in ("__init__", "cli", "__main__") if (path := PACKAGE / f"{name}.py").exists()]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    return sorted(name.removesuffix(".__init__") for name in names if not name.endswith("__main__"))


def frameworks_loaded_by(modules, path=()):
    program = [sys.executable, "-c", PROGRAM, ",".join(FRAMEWORKS), *modules]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *map(str, path)])}
    ended = subprocess.run(program, env=environment, cwd="/", capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_the_list_is_not_empty():
    assert "mindspeed_precision.dump.reader" in offline_modules()


def test_no_framework_after_dump():
    assert frameworks_loaded_by(offline_modules()) == ""


@pytest.mark.parametrize("framework", ["torch", "mindspore"])
def test_the_guard_can_fail(tmp_path, framework):
    (tmp_path / framework).mkdir()
    (tmp_path / framework / "__init__.py").write_text("")
    (tmp_path / "stage.py").write_text(f"import {framework}\n")
    assert frameworks_loaded_by(["stage"], path=[tmp_path]) == framework


@pytest.mark.torch
def test_the_guard_sees_the_torch_backend():
    pytest.importorskip("torch")
    assert "torch" in frameworks_loaded_by(["mindspeed_precision.backends.torch"])
