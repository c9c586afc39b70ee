"""Fixtures that every part shares: where versions of Megatron are, and Megatron inside this process."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A busy machine draws slowly; that says nothing about the code.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

ROOT = Path(__file__).resolve().parent.parent
IN_PROCESS = "0.17.1"
_EXIT_STATUS = pytest.StashKey[int]()


def megatron_versions() -> Path:
    """Return the directory of megatron-core versions, side by side: ``MSP_MCORE``, or ``.mcore`` here."""
    return Path(os.environ.get("MSP_MCORE", ROOT / ".mcore"))


@pytest.fixture(scope="session")
def megatron() -> Callable[[str], Path]:
    """Return a function that gives the directory of a megatron-core version, or skips without it."""

    def find(version: str) -> Path:
        directory = megatron_versions() / version
        if not (directory / "megatron" / "core").is_dir():
            pytest.skip(f"megatron-core {version} is not in {megatron_versions()}: make test installs it")
        return directory

    return find


@pytest.fixture(scope="session")
def cpu_megatron(megatron: Callable[[str], Path]) -> Path:
    """Make megatron-core importable in this process, on the CPU; it stays so for the rest of the session."""
    directory = megatron(IN_PROCESS)
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
    from mindspeed_precision.testing import cpu

    assert cpu.install(), "a real accelerator is here: these tests compare CPU runs"
    return directory


def _mindspore(variable: str, directory: str) -> Path:
    """Return the interpreter that ``variable`` names, else the one in ``directory``, or skip and say why."""
    python = Path(os.environ.get(variable) or ROOT / directory / "bin" / "python")
    reason = python.parent.parent / ".unavailable"
    if reason.is_file():
        pytest.skip(reason.read_text().strip())
    if not python.is_file():
        pytest.skip(f"no MindSpore at {python}: make mindspore installs it, {variable} names another")
    return python


@pytest.fixture(scope="session")
def mindspore_python() -> Path:
    """Return the interpreter with MindSpore 2.7.1, mindtorch and megatron-core 0.12.1, or skip without it."""
    return _mindspore("MSP_MINDSPORE_PYTHON", ".venv-mindspore")


@pytest.fixture(scope="session")
def mindspore_native_python() -> Path:
    """Return the interpreter with MindSpore 2.10.0 and no torch API on it, or skip without it."""
    return _mindspore("MSP_MINDSPORE_NATIVE_PYTHON", ".venv-mindspore-native")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Set what MindSpore takes once per process, and only before its first operator."""
    wanted = any(item.get_closest_marker("mindspore") for item in session.items)
    if wanted and importlib.util.find_spec("mindspore") is not None:
        import mindspore

        mindspore.set_device("CPU")
        mindspore.runtime.launch_blocking()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Keep the exit status for ``pytest_unconfigure``."""
    session.config.stash[_EXIT_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End here where MindSpore was loaded: now and then it aborts while the interpreter ends."""
    if "mindspore" in sys.modules and _EXIT_STATUS in config.stash:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[_EXIT_STATUS])
