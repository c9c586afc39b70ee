"""The stand-in for torch_npu: asked for, announced, and empty; each test has a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.matrix]

ROOT = Path(__file__).parents[2]
INSTALLED = """
from mindspeed_precision.testing import cpu, torch_npu_stand_in
cpu.install()
torch_npu_stand_in.install()
import sys, torch, torch_npu
"""


def run(program, *path):
    """Run ``program`` in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), str(ROOT)])}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )


def passes(program):
    ended = run(INSTALLED + program)
    assert ended.returncode == 0, ended.stderr
    return ended


def test_it_says_once_what_it_is():
    ended = passes("torch_npu_stand_in.install()\nprint(torch_npu.__version__)")
    assert ended.stdout.strip() == "0.0.0+cpu-stand-in"
    assert ended.stderr.count("a stand-in for tests") == 1


def test_nothing_installs_it_unasked():
    asked = (
        "import sys, mindspeed_precision.testing.torch_npu_stand_in; assert 'torch_npu' not in sys.modules"
    )
    assert run(asked).returncode == 0


def test_it_is_no_npu():
    passes(
        "from mindspeed_precision.backends.npu import loaded_npu, npu_module\n"
        "assert loaded_npu().loaded == torch_npu_stand_in.VERSION and not loaded_npu().problem\n"
        "assert not loaded_npu().usable and npu_module() is None\n"
        "from mindspeed_precision.session import _device\n"
        "assert _device() != 'npu'\n"
    )


def test_what_computes_is_refused_and_not_pretended_to_be_there():
    ended = passes(
        "assert not hasattr(torch_npu, 'npu_fusion_attention')\n"
        "try:\n    torch_npu.npu_matmul_add_fp32\n"
        "except AttributeError as error:\n    print(error)\n"
    )
    assert ended.stdout.strip() == (
        "torch_npu.npu_matmul_add_fp32 needs an NPU: this is the stand-in 0.0.0+cpu-stand-in"
    )


def test_seeds_and_streams_are_those_of_the_cpu_layer():
    passes(
        "torch_npu.npu.manual_seed_all(3)\n"
        "first = torch.rand(4)\n"
        "torch.manual_seed(3)\n"
        "assert torch.equal(first, torch.rand(4))\n"
        "assert torch.npu.Stream is torch.cuda.Stream\n"
    )


def test_a_real_torch_npu_is_never_hidden(tmp_path):
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text("")
    ended = run(INSTALLED, tmp_path)
    assert ended.returncode != 0
    assert "torch_npu is installed, and a stand-in would hide it" in ended.stderr
