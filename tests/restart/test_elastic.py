"""torchrun restarts its workers: training ends as it would without us, and attempts are not mixed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.records import INIT_STEP, Verdict

pytestmark = [pytest.mark.torch, pytest.mark.matrix]

SCRIPT = Path(__file__).parent / "scripts" / "elastic.py"


def train(directory, *out, healthy=False):
    """Return status, losses by rank, and what was printed.

    Several restarts are allowed: on a busy machine gloo may fail to connect the second time, before any step.
    """
    directory.mkdir()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--max-restarts", "6", "--monitor-interval", "0.1"),
        *(str(SCRIPT), str(directory / "checkpoint"), str(directory / "losses"), *map(str, out)),
    ]
    environment = {**os.environ, **({"HEALTHY": "1"} if healthy else {})}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    losses = [
        (directory / f"losses.{rank}").read_text() if (directory / f"losses.{rank}").exists() else ""
        for rank in (0, 1)
    ]
    return done.returncode, losses, done.stderr


def kept(losses):
    """Return the losses that count: the last of each step."""
    return {line.split()[1]: line.split()[2] for line in losses.splitlines()}


def test_a_restart_of_torchrun_is_told_apart_and_changes_nothing(tmp_path):
    plain = train(tmp_path / "plain")
    seen = train(tmp_path / "seen", tmp_path / "seen" / "run")
    assert (seen[0], plain[0]) == (0, 0), seen[2][-3000:]
    assert [kept(losses) for losses in seen[1]] == [kept(losses) for losses in plain[1]]
    assert "restart01" in seen[2]  # where it records to
    unbroken = train(tmp_path / "unbroken", tmp_path / "unbroken" / "run", healthy=True)
    assert unbroken[0] == 0
    run = load_run(tmp_path / "seen" / "run")
    entries = {path.name for path in (tmp_path / "seen" / "run").iterdir() if path.suffix != ".part"}
    assert entries == {
        "run.json",
        "rank00000",
        "rank00001",
        "restart01",
    }  # who was killed leaves what it wrote
    for rank in run.ranks.values():
        assert rank.complete
        assert rank.steps == (INIT_STEP, 0, 1, 2, 3, 4, 5)
    assert any("restart01 began with step 3" in note for note in run.notes)
    diagnosis = compare_runs(tmp_path / "unbroken" / "run", tmp_path / "seen" / "run", policy="exact")
    different = [one.key for one in diagnosis.comparisons if one.verdict is not Verdict.IDENTICAL]
    assert different == []
    assert diagnosis.status is Verdict.IDENTICAL
