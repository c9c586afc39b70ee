"""Capture that stays on must not grow: resident memory of a long run, thread and hooks included."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc"),
]
SCRIPT = Path(__file__).parent / "scripts" / "record_many_steps.py"
A_STEP = 150
"""KiB that a leak of one step's records would add a step, at the least."""


@pytest.fixture
def environment(megatron):
    path = os.pathsep.join([str(megatron("0.17.1")), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


def growth(environment, out, steps, leak="none"):
    """Return by how many KiB a step resident memory grew, from the third quarter of a run to its last.

    In the first half the allocator and the libraries still take what they keep, recorded or not.
    """
    program = [sys.executable, "-W", "ignore", str(SCRIPT), str(out), str(steps), leak]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    resident = [int(line) for line in done.stdout.splitlines() if line.isdigit()]
    assert len(resident) == steps
    quarter = steps // 4
    before, after = resident[2 * quarter : 3 * quarter], resident[-quarter:]
    return (statistics.median(after) - statistics.median(before)) / quarter


@pytest.mark.matrix
def test_forty_steps_do_not_grow_and_a_leak_of_the_records_would_show(environment, tmp_path):
    healthy = growth(environment, tmp_path / "healthy", 40)
    leaking = growth(environment, tmp_path / "leaking", 40, "leak")
    assert healthy < A_STEP / 5
    assert leaking > A_STEP


@pytest.mark.long
def test_two_hundred_steps_do_not_grow(environment, tmp_path):
    assert growth(environment, tmp_path / "run", 200) < A_STEP / 25
