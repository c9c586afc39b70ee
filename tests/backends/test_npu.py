"""torch_npu installed where it does not fit: what it does to torch, and what we say about it.

The packages written here fail as the real wheel does without CANN (measured with torch-npu 2.13.0:
ImportError after ``torch_npu._init``, RuntimeError from ``import torch`` through its entry point). Each test
has a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_precision.backends import npu

pytestmark = [pytest.mark.torch, pytest.mark.matrix]  # processes that import torch, one a test

ROOT = Path(__file__).parents[2]
METADATA = "Metadata-Version: 2.1\nName: torch-npu\nVersion: 9.9\n"
ENTRY_POINT = "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"

HEALTHY = """
import torch, types
__version__ = "9.9"
npu = types.SimpleNamespace(is_available=lambda: {available})
torch.npu = npu
def _autoload(): pass
"""
FAILING = """
import torch_npu._init
{raising}
"""


def write_package(directory, text, *, autoload=False):
    """Write a torch_npu of version 9.9 with its metadata, as pip would leave it."""
    package = directory / "torch_npu"
    (package / "_init").mkdir(parents=True)
    (package / "__init__.py").write_text(text)
    (package / "_init" / "__init__.py").write_text("")
    metadata = directory / "torch_npu-9.9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(METADATA)
    if autoload:
        (metadata / "entry_points.txt").write_text(ENTRY_POINT)


def run(directory, *arguments, **environment):
    """Run Python with the package on its path and autoloading as torch has it, unless told otherwise."""
    path = os.pathsep.join([str(directory), str(ROOT)])
    clean = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**clean, "PYTHONPATH": path, **environment},
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )


def environment(directory, **variables):
    """Return what ``mindspeed-precision environment --json`` says."""
    ended = run(directory, "-m", "mindspeed_precision", "environment", "--json", **variables)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize(
    "error",
    ["ImportError('libhccl.so: cannot open')", "OSError('libascendcl.so')", "RuntimeError('no CANN')"],
)
def test_an_import_that_fails_is_said_and_torch_stays_usable(tmp_path, error):
    write_package(tmp_path, FAILING.format(raising=f"raise {error}"))
    said = environment(tmp_path)
    assert said["framework"] == "torch"
    assert said["device"] == "cpu"
    assert (said["npu"]["installed"], said["npu"]["loaded"], said["npu"]["usable"]) == ("9.9", "", False)
    assert said["npu"]["problem"].startswith(f"import torch_npu raises {error.partition('(')[0]}")
    assert "set_env.sh" in said["npu"]["remedy"]


def test_autoloading_breaks_torch_itself_and_the_cure_is_said(tmp_path):
    write_package(tmp_path, FAILING.format(raising="raise ImportError('libhccl.so: gone')"), autoload=True)
    assert run(tmp_path, "-c", "import torch").returncode != 0  # else this test proves nothing
    said = environment(tmp_path)
    assert said["framework"] == said["device"] == ""
    assert "libhccl.so: gone" in said["npu"]["problem"]
    assert npu.AUTOLOAD_OFF in said["npu"]["remedy"]
    assert said["described"] == said["npu"]["problem"]  # a second import of torch would raise something else


def test_patches_check_says_who_broke_torch(tmp_path):
    write_package(tmp_path, FAILING.format(raising="raise ImportError('libhccl.so: gone')"), autoload=True)
    ended = run(tmp_path, "-m", "mindspeed_precision", "patches", "check")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.count("\n") == 1
    assert "libhccl.so: gone" in ended.stderr
    assert npu.AUTOLOAD_OFF in ended.stderr


def test_the_cure_works(tmp_path):
    write_package(tmp_path, FAILING.format(raising="raise ImportError('libhccl.so: gone')"), autoload=True)
    said = environment(tmp_path, **dict([npu.AUTOLOAD_OFF.split("=")]))
    assert (said["framework"], said["device"]) == ("torch", "cpu")


LEFT_BEHIND = """
import sys, torch
from mindspeed_precision.backends.npu import loaded_npu, npu_module
try:
    import torch_npu
except ImportError:
    pass
assert "torch_npu._init" in sys.modules
print(loaded_npu())
assert npu_module() is None
"""


def test_what_a_failed_import_leaves_behind_is_no_npu(tmp_path):
    write_package(tmp_path, FAILING.format(raising="raise ImportError('libhccl.so')"))
    ended = run(tmp_path, "-c", LEFT_BEHIND)
    assert ended.returncode == 0, ended.stderr
    assert "not usable" in ended.stdout
    assert "torch_npu._init" in ended.stdout


DURING = """
from mindspeed_precision.backends.npu import loaded_npu
import torch, types
torch.npu = types.SimpleNamespace(is_available=lambda: True)
assert not loaded_npu().usable
"""


def test_a_module_that_is_being_imported_is_no_npu_yet(tmp_path):
    write_package(tmp_path, DURING)
    after = "from mindspeed_precision.backends.npu import loaded_npu; assert loaded_npu().usable"
    ended = run(tmp_path, "-c", f"import torch_npu; {after}")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(("available", "device"), [("True", "npu"), ("False", "cpu")])
def test_a_healthy_one_decides_by_is_available(tmp_path, available, device):
    write_package(tmp_path, HEALTHY.format(available=available), autoload=True)
    said = environment(tmp_path)
    assert (said["npu"]["loaded"], said["device"]) == ("9.9", device)
    assert said["npu"]["problem"] == ""


def test_a_device_that_raises_when_asked_is_not_usable(tmp_path):
    raising = "(_ for _ in ()).throw(RuntimeError('driver is gone'))"
    write_package(tmp_path, HEALTHY.format(available=raising))
    said = environment(tmp_path)
    assert (said["npu"]["usable"], said["device"]) == (False, "cpu")
    assert "driver is gone" in said["npu"]["problem"]


def test_without_it_nothing_is_wrong(tmp_path):
    said = environment(tmp_path)
    assert said["npu"] == {"installed": "", "loaded": "", "usable": False, "problem": "", "remedy": ""}


COMMANDS = """
import sys
from pathlib import Path
from mindspeed_precision import compare
from mindspeed_precision.cli import main
from mindspeed_precision.testing.fake_runs import write_fake_run
write_fake_run(Path("one"))
assert main(["compare", "one", "one", "--out", "out"]) == 0
assert main(["show", "one"]) == 0
assert main(["patches", "list"]) == 0
assert not {name for name in sys.modules if name.partition(".")[0] in ("torch", "torch_npu")}
"""


def test_nothing_of_ours_imports_it_unasked(tmp_path):
    write_package(tmp_path, "import os\nos._exit(9)\n", autoload=True)  # importing it cannot go unseen
    assert run(tmp_path, "-c", "import torch_npu").returncode == 9
    ended = run(tmp_path, "-c", COMMANDS)
    assert ended.returncode == 0, ended.stderr


TRAINING = """
import torch
from mindspeed_precision import Session
import mindspeed_precision.pretrain, mindspeed_precision.session, mindspeed_precision.backends.torch
from mindspeed_precision.cli import main
sys_status = main(["patches", "check"])
"""


def test_what_trains_does_not_import_it_either(tmp_path):
    write_package(tmp_path, "import os\nos._exit(9)\n", autoload=True)
    ended = run(tmp_path, "-c", TRAINING, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert ended.returncode == 0, ended.stderr


IN_A_RUN = """
import torch
try:
    import torch_npu
except ImportError:
    pass
from mindspeed_precision.capture.configuration import versions
from mindspeed_precision.session import _device
print(_device(), versions().get("torch_npu"))
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEALTHY.format(available="True"), "npu 9.9"),
        (HEALTHY.format(available="False"), "cpu 9.9"),
        (FAILING.format(raising="raise ImportError('libhccl.so')"), "cpu 9.9, not loaded"),
    ],
)
def test_a_run_computes_on_what_is_usable_and_records_what_is_installed(tmp_path, text, said):
    write_package(tmp_path, text)
    ended = run(tmp_path, "-c", IN_A_RUN)
    assert ended.stdout.strip() == said, ended.stderr
