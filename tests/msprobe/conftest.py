"""Golden dumps of ``small_net.py``, made by mindstudio-probe 26.2.0 (``make_golden.py``)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

GOLDEN = Path(__file__).with_name("golden")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def golden():
    """Return a function that gives a golden dump by framework, level and kind."""

    def find(name):
        directory = GOLDEN / name
        assert directory.is_dir(), sorted(path.name for path in GOLDEN.iterdir())
        return directory

    return find


@pytest.fixture
def copied(golden, tmp_path):
    """Return a function that copies a golden dump to where it can be damaged."""

    def copy(name):
        return Path(shutil.copytree(golden(name), tmp_path / name))

    return copy


@pytest.fixture(scope="session")
def msprobe_python():
    """Return the interpreter in whose environment msprobe is, or skip and say how to get it."""
    python = Path(os.environ.get("MSP_MSPROBE_PYTHON") or ROOT / ".venv-msprobe" / "bin" / "python")
    if not python.is_file() or not python.with_name("msprobe").is_file():
        pytest.skip(f"no msprobe at {python}: make .venv-msprobe/.ready installs it")
    return python
