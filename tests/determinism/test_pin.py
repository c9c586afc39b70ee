"""The verb: what it pins, what it refuses, and that a pinned training repeats."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys

import numpy as np
import pytest

from mindspeed_precision import determinism
from mindspeed_precision.config import DeterminismSettings
from mindspeed_precision.determinism import Status, algorithms, environment, pin, progress, seeds
from mindspeed_precision.errors import ConfigError, DeterminismError

SETTINGS = DeterminismSettings(
    enabled=True, seed=1234, reseed=False, zero_dropout=False, fill_uninitialized_memory=True, strict=True
)


def with_(**changes: object) -> DeterminismSettings:
    return dataclasses.replace(SETTINGS, **changes)


@pytest.fixture
def started(monkeypatch):
    """Pretend that the interpreter was started with the environment given; unset every pinned variable."""
    for row in environment.ENVIRONMENT:
        monkeypatch.setenv(row.name, "")
        monkeypatch.delenv(row.name)

    def start(**exported: str) -> None:
        monkeypatch.setattr(progress, "start_environment", lambda: exported)

    start(PYTHONHASHSEED="1234")
    return start


@pytest.fixture
def switches_restored():
    """Put torch's switches back after a test."""
    before = algorithms.snapshot()
    yield
    algorithms.reassert(before)


@pytest.mark.usefixtures("switches_restored")
def test_strict_names_everything_that_is_too_late_in_one_line(started, monkeypatch):
    started()
    passed = {progress.Deadline.PROCESS_GROUP: "torch.distributed is initialised"}
    monkeypatch.setattr(
        progress, "look", lambda device: progress.Progress(passed=passed, start_environment={})
    )
    with pytest.raises(DeterminismError) as caught:
        pin(SETTINGS, device="npu")
    line = str(caught.value)
    assert "\n" not in line
    for name in ("PYTHONHASHSEED", "HCCL_DETERMINISTIC", "LCCL_DETERMINISTIC"):
        assert name in caught.value.what
        assert f"{name}=" in caught.value.remedy
    assert "CLOSE_MATMUL_K_SHIFT" not in line
    assert "launch/torch_npu.sh" in caught.value.remedy


@pytest.mark.usefixtures("switches_restored")
def test_not_strict_reports_the_same_as_findings(started):
    started()
    report = pin(with_(strict=False), device="cpu")
    (finding,) = report.findings
    assert finding.id == "determinism.too_late"
    assert finding.severity.value == "warning"
    assert "PYTHONHASHSEED" in finding.title
    assert "launch/cpu.sh" in finding.remedy


@pytest.mark.usefixtures("switches_restored")
def test_on_a_cpu_no_device_variable_is_asked_for(started):
    report = pin(SETTINGS, device="cpu")
    assert not report.findings
    assert {outcome.name for outcome in report.outcomes if outcome.status is not Status.NOT_APPLICABLE} == {
        "PYTHONHASHSEED"
    }
    assert not {row.name for row in environment.ENVIRONMENT} & set(os.environ)


def test_disabled_changes_nothing(started):
    before = algorithms.snapshot()
    report = pin(with_(enabled=False, seed=-1), device="npu")
    assert (report.outcomes, report.switches, report.findings) == ((), {}, ())
    assert algorithms.snapshot() == before


def test_unknown_device_is_refused():
    with pytest.raises(ConfigError, match="tpu"):
        pin(SETTINGS, device="tpu")


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, True, "1"])
def test_seed_out_of_range_is_refused(seed):
    with pytest.raises(ConfigError, match=r"determinism\.seed"):
        seeds.seed_everything(seed)


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_seeds_reproduce_python_and_numpy(seed):
    state = random.getstate(), np.random.get_state()
    draws = []
    for _ in range(2):
        assert seeds.seed_everything(seed)[:2] == ("python", "numpy")
        draws.append((random.random(), np.random.rand()))
    assert draws[0] == draws[1]
    assert draws[0] != (random.random(), np.random.rand())
    random.setstate(state[0])
    np.random.set_state(state[1])


@pytest.mark.torch
def test_seeds_reproduce_torch():
    torch = pytest.importorskip("torch")
    with torch.random.fork_rng(devices=[]):
        assert "torch" in seeds.seed_everything(11)
        first = torch.rand(4)
        seeds.seed_everything(11)
        assert torch.equal(first, torch.rand(4))
        assert not torch.equal(first, torch.rand(4))


class FakeNpu:
    """Stands in for ``torch_npu`` and ``torch.npu``: the hardware is absent; only the calls are checked."""

    def __init__(self, available=True):
        self.calls = []
        self.is_available = lambda: available

    def manual_seed_all(self, seed):
        self.calls.append(("manual_seed_all", seed))

    def manual_seed(self, seed):
        self.calls.append(("manual_seed", seed))


@pytest.mark.torch
def test_npu_is_seeded_on_every_card(monkeypatch):
    torch = pytest.importorskip("torch")
    fake = FakeNpu()
    monkeypatch.setitem(sys.modules, "torch_npu", fake)
    monkeypatch.setattr(torch, "npu", fake, raising=False)
    with torch.random.fork_rng(devices=[]):
        assert "npu" in seeds.seed_everything(5)
    assert fake.calls == [("manual_seed_all", 5), ("manual_seed", 5)]


@pytest.mark.torch
def test_a_torch_npu_without_a_device_is_passed_over(monkeypatch):
    torch = pytest.importorskip("torch")
    fake = FakeNpu(available=False)
    monkeypatch.setitem(sys.modules, "torch_npu", fake)
    monkeypatch.setattr(torch, "npu", fake, raising=False)
    with torch.random.fork_rng(devices=[]):
        assert "npu" not in seeds.seed_everything(5)
    assert fake.calls == []


def test_a_torch_npu_whose_import_failed_is_passed_over(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", object())
    assert "npu" not in seeds.seed_everything(5)


def test_nothing_here_imports_a_framework():
    program = (
        "import sys, dataclasses\n"
        "from mindspeed_precision import determinism, config\n"
        "settings = dataclasses.replace(config.load_settings().determinism, reseed=True)\n"
        "report = determinism.pin(settings, device='cpu')\n"
        "assert report.switches == {}, report\n"
        "assert report.seeded == ('python', 'numpy'), report\n"
        "assert determinism.reassert({'cudnn_benchmark': True}) == []\n"
        "assert not {'torch', 'mindspore', 'torch_npu'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": "1"}, check=True)


TRAINING = """
import sys, dataclasses, torch
from mindspeed_precision import config, determinism
if sys.argv[1] == "pinned":
    settings = dataclasses.replace(config.load_settings().determinism, reseed=True)
    determinism.pin(settings, device="cpu")
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 2))
for name in {"alpha", "beta", "gamma", "delta", "epsilon"}:  # a set of strings: ordered by the hash seed
    model.zero_grad()
    (model(torch.randn(4, 8)) * len(name)).square().mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.001 * p.grad
sys.stdout.write(",".join(float(p.double().sum()).hex() for p in model.parameters()))
"""


def train(*hows: str) -> list[str]:
    """Train once for each of ``hows``, at the same time; return the final parameters."""
    environ = {**os.environ, "PYTHONHASHSEED": "3", "OMP_NUM_THREADS": "1"}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", TRAINING, how], env=environ, stdout=subprocess.PIPE, text=True
        )
        for how in hows
    ]
    results = [run.communicate()[0] for run in runs]
    assert [run.returncode for run in runs] == [0] * len(runs)
    return results


@pytest.mark.matrix
@pytest.mark.torch
def test_a_pinned_training_repeats_and_an_unpinned_one_does_not():
    first, second, free, also_free = train("pinned", "pinned", "free", "free")
    assert first == second != ""
    assert free != also_free


def test_public_names_exist():
    for name in determinism.__all__:
        assert hasattr(determinism, name)
