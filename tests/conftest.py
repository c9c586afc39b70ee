"""Fixtures that every part shares: where versions of Megatron are, and Megatron inside this process."""

from __future__ import annotations

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
