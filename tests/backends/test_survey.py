"""What ``mindspeed-precision environment`` finds: which framework answers to ``import torch``, if any."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

MINDSPORE = """
__version__ = "2.7.1"
class Tensor: pass
def get_context(name):
    return {target!r}
"""
ADAPTER = 'import mindspore\n__version__ = "2.1.0"\nTensor = mindspore.Tensor\n'
WITHOUT = """
import sys
from mindspeed_precision.cli import main
for name in {names!r}:
    sys.modules[name] = None  # as if it were not installed
raise SystemExit(main(["environment"]))
"""


def environment(directory, *, without=(), **modules):
    """Return the printed rows by title, where ``modules`` come first and ``without`` are not installed."""
    for name, text in modules.items():
        (directory / name).mkdir()
        (directory / name / "__init__.py").write_text(text)
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(names=without)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return {
        line.split()[0]: line.split(maxsplit=1)[1] for line in ended.stdout.splitlines() if line[0] != " "
    }


def test_a_torch_that_is_mindspore_underneath_is_named(tmp_path):
    rows = environment(tmp_path, mindspore=MINDSPORE.format(target="Ascend"), torch=ADAPTER)
    assert rows["framework"] == (
        f"MindSpore 2.7.1 behind the torch API of {tmp_path}/torch/__init__.py, which says it is 2.1.0"
    )
    assert rows["device"] == "npu"


def test_mindspore_alone(tmp_path):
    rows = environment(tmp_path, without=("torch",), mindspore=MINDSPORE.format(target="CPU"))
    assert rows["framework"] == "MindSpore 2.7.1, native (no torch can be imported)"
    assert rows["npu"] == "torch_npu is not installed"
    assert rows["device"] == "cpu"


def test_neither(tmp_path):
    rows = environment(tmp_path, without=("torch", "mindspore"))
    assert rows["framework"] == "neither torch nor MindSpore is installed"
    assert rows["device"] == "none: nothing can be trained here; comparing needs no framework"


def test_a_mindspore_that_cannot_be_imported_is_said(tmp_path):
    broken = "raise TypeError('built with NumPy 1')"
    rows = environment(tmp_path, without=("torch",), mindspore=broken)
    assert rows["framework"] == "import mindspore raises TypeError: built with NumPy 1"
