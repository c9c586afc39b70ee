"""SIGKILL at random moments of a training; ``make kill-matrix`` does it some hundred times."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.torch,
    pytest.mark.matrix,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]

KILLS = 20


def test_whole_steps_survive_a_kill_at_any_moment():
    """Every whole step is read, and says what an unbroken run says; a step that was said to be there is."""
    script = Path(__file__).with_name("kill_matrix.py")
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(KILLS), "--seed", "20"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == f"{KILLS} kills, seed 20: 0 runs not readable"
    assert "while a step was written" in ended.stdout  # else nothing was put to the test
