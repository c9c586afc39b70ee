"""The declaration of the CPU layer: complete, documented, and refusing what it cannot do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in an interpreter of its own: the layer changes the process that it is installed in."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )


def test_every_piece_says_why_and_what_happens_without_it():
    from mindspeed_precision.testing import cpu

    assert len({piece.name for piece in cpu.PIECES}) == len(cpu.PIECES)
    for piece in cpu.PIECES:
        assert len(piece.why) > 40, piece.name
        assert piece.error_without, piece.name
        assert piece.when, piece.name
        assert piece.optional or not piece.error_without.startswith("none"), piece.name


def test_every_piece_is_in_the_guide():
    from mindspeed_precision.testing import cpu

    guide = (ROOT / "docs" / "megatron-on-cpu.md").read_text()
    assert [piece.name for piece in cpu.PIECES if f"`{piece.name}`" not in guide] == []


@pytest.mark.matrix
def test_importing_the_layer_changes_nothing():
    done = run(
        "import torch, torch.distributed as dist\n"
        "before = (torch.empty, torch.Tensor.cuda, torch.cuda.is_available, dist.isend)\n"
        "from mindspeed_precision.testing import cpu\n"
        "assert before == (torch.empty, torch.Tensor.cuda, torch.cuda.is_available, dist.isend)\n"
        "assert cpu.installed_pieces() == ()"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.matrix
def test_a_second_installation_does_nothing():
    done = run(
        "from mindspeed_precision.testing import cpu; import torch\n"
        "assert cpu.install(except_pieces=['no_compilation'])\n"
        "first, empty = cpu.installed_pieces(), torch.empty\n"
        "assert cpu.install() and cpu.installed_pieces() == first and torch.empty is empty\n"
        "assert 'no_compilation' not in first and len(first) == len(cpu.PIECES) - 1\n"
        "assert torch.empty(2, device='cuda:0').device.type == 'cpu'\n"
        "assert torch.ones(2).cuda().type() == 'torch.cuda.FloatTensor'\n"
        "assert torch.ones(2).to('cuda', torch.bfloat16).dtype is torch.bfloat16\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.matrix
def test_a_real_device_is_left_alone():
    done = run(
        "import torch; torch.cuda.is_available = lambda: True; before = torch.empty\n"
        "from mindspeed_precision.testing import cpu\n"
        "assert cpu.install() is False and cpu.installed_pieces() == () and torch.empty is before"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.matrix
def test_too_late_is_an_error_that_says_so():
    done = run(
        "import sys, types; sys.modules['megatron.core'] = types.ModuleType('megatron.core')\n"
        "from mindspeed_precision.testing import cpu\n"
        "from mindspeed_precision.errors import PatchError\n"
        "try: cpu.install()\n"
        "except PatchError as error: print(error)\n"
    )
    assert "too late" in done.stdout
    assert "before the first import of megatron" in done.stdout


def test_an_unknown_piece_is_an_error_that_names_it():
    from mindspeed_precision.errors import ConfigError
    from mindspeed_precision.testing import cpu

    with pytest.raises(ConfigError, match="no_such_piece"):
        cpu.install(except_pieces=["no_such_piece"])


@pytest.mark.matrix
def test_a_script_runs_as_itself(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, neighbour\n"
        "assert __name__ == '__main__' and sys.argv[1:] == ['--flag', 'x'], sys.argv\n"
        "print(torch.cuda.is_available(), neighbour.HERE)\n"
    )
    (tmp_path / "neighbour.py").write_text("HERE = 'beside the script'\n")
    module = [sys.executable, "-m", "mindspeed_precision.testing.cpu"]
    done = subprocess.run(
        [*module, str(script), "--flag", "x"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )
    assert done.stdout.split() == ["True", "beside", "the", "script"], done.stderr
    done = subprocess.run(
        [*module, "--without", "nonsense", str(script)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "no such piece" in done.stderr
    assert "Traceback" not in done.stderr


def test_fused_kernels_are_not_built():
    """The legacy tree is in no wheel, so its piece is shown on a module of the same shape."""
    import types

    from mindspeed_precision.testing.cpu import megatron

    module = types.ModuleType("megatron.legacy.fused_kernels")
    module.load = lambda args: None + ""  # what upstream's does without CUDA_HOME
    with pytest.raises(TypeError):
        module.load(None)
    megatron._load_no_fused_kernels(module)
    assert module.load(None) is None


def test_a_missing_helper_library_is_still_compiled(tmp_path):
    """The piece skips ``make`` only where the built library is."""
    import types

    from mindspeed_precision.testing.cpu import megatron

    calls = []

    def fresh():
        module = types.ModuleType("megatron.core.datasets.utils")
        module.__file__ = str(tmp_path / "utils.py")
        module.compile_helpers = lambda: calls.append("make")
        megatron._take_prebuilt_helpers(module)
        return module

    fresh().compile_helpers()
    assert calls == ["make"]
    (tmp_path / "helpers_cpp.cpython-311.so").touch()
    fresh().compile_helpers()
    assert calls == ["make"]


def test_triton_stands_in_for_names_and_refuses_to_launch():
    done = run(
        "from mindspeed_precision.testing import cpu; cpu.install()\n"
        "import triton, triton.language as tl\n"
        "from triton.language.extra import libdevice\n"
        "@triton.autotune(configs=[triton.Config({'B': 1})], key=['n'])\n"
        "@triton.jit\n"
        "def kernel(x, n: tl.constexpr): pass\n"
        "try: kernel[(1,)](0)\n"
        "except NotImplementedError as error: print(error)\n"
        "from torch.utils._triton import has_triton_package\n"
        "assert not has_triton_package()\n"
    )
    assert "kernel" in done.stdout, done.stderr


@pytest.mark.parametrize(("size", "length"), [(2, 8), (4, 4)])
def test_context_parallel_masks_make_the_causal_mask(size, length):
    """Put back into the order of the sequence, the ranks' masks are the one causal mask."""
    import torch

    from mindspeed_precision.testing.cpu.context_parallel import causal_mask, zigzag_positions

    positions = [zigzag_positions(rank, size, length=length) for rank in range(size)]
    keys = torch.cat(positions)
    assert sorted(keys.tolist()) == list(range(size * length))
    whole = torch.zeros(size * length, size * length, dtype=torch.bool)
    for rank in range(size):
        whole[positions[rank][:, None], keys[None, :]] = causal_mask(rank, size, length=length)[0, 0]
    assert torch.equal(whole, torch.ones_like(whole).triu(1))
