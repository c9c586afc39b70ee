"""Starting to record costs the same however many ranks there are, and a step has no collective of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mindspeed_precision.dump.attempts import begin_attempt, end_attempt
from mindspeed_precision.dump.writer import create_run
from mindspeed_precision.record.process_group import group_note
from mindspeed_precision.testing.demo.launch import training_environment

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "startup.py"
FEW, MANY = 8, 4096


@pytest.mark.torch
@pytest.mark.megatron
@pytest.mark.matrix
def test_collectives_and_files_are_as_many_for_4096_ranks_as_for_8(megatron):
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), "--json", "--ranks", str(FEW), str(MANY)],
        env=training_environment(megatron("0.17.1"), {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    few, many = found[str(FEW)], found[str(MANY)]
    assert len(few) == 7
    for phase, cost in few.items():
        assert many[phase]["collectives"] == cost["collectives"], phase
        assert many[phase]["files"] == cost["files"], phase
    for phase in ("first step", "later step"):
        for start in ("start", "restart"):
            assert few[f"{start}, {phase}"]["collectives"] == few["bare"]["collectives"] != {}
    assert sum(few["start"]["collectives"].values()) == 2  # where the run lies: a length, and a text
    assert few["restart"]["files"]["os.listdir"] == 2
    for start in ("start", "restart"):
        assert few[f"{start}, later step"]["files"] == {}


def stats(run, restart, monkeypatch):
    """Return how often the file system is asked about a path in the run while an attempt begins."""
    asked = []

    def counting(stat):
        def counted(path, *args, **kwargs):
            if str(path).startswith(str(run)):
                asked.append(str(path))
            return stat(path, *args, **kwargs)

        return counted

    with monkeypatch.context() as patching:
        for holder in (os, Path):  # Python 3.10's paths have an os.stat of their own
            patching.setattr(holder, "stat", counting(holder.stat))
        begin_attempt(run, restart)
    return len(asked)


def test_a_restart_asks_for_no_directory_of_a_rank(tmp_path, monkeypatch):
    counts = []
    for ranks in (1, 2000):
        run = tmp_path / str(ranks)
        create_run(run, {"parallel": {"world_size": ranks}})
        for rank in range(ranks):
            (run / f"rank{rank:05d}").mkdir()
        counts.append(stats(run, "continue", monkeypatch))
        end_attempt(run)
    assert counts[0] == counts[1] > 0


def test_the_words_for_a_large_group_take_no_time():
    began = time.process_time()
    assert group_note(range(20_000)) == "over ranks 0-19999"
    assert group_note([*range(0, 20_000, 8), *range(1, 20_000, 8)]) == "over 5000 ranks"
    assert time.process_time() - began < 5  # half a minute, if it grew with the square
