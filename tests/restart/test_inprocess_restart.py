"""Megatron's in-process restart, nvidia-resiliency-ext and all: as without us, attempts told apart."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.records import INIT_STEP, Verdict
from mindspeed_precision.testing.demo.arguments import demo_arguments
from mindspeed_precision.testing.demo.launch import free_port, parse_log, training_environment

pytestmark = [pytest.mark.torch, pytest.mark.megatron, pytest.mark.long]

SCRIPT = "tests/restart/scripts/inprocess.py"
NOT_HERE = "nvidia-resiliency-ext 0.6 is not here: make inprocess-restart installs it out of the way"
RESTARTING = [
    *("--inprocess-restart", "--inprocess-granularity", "rank", "--inprocess-active-world-size", "2"),
    *("--inprocess-heartbeat-interval", "1", "--inprocess-monitor-thread-interval", "0.1"),
    *("--inprocess-monitor-process-interval", "0.1", "--inprocess-last-call-wait", "0.2"),
]


@pytest.fixture(scope="module", autouse=True)
def resiliency():
    module = pytest.importorskip("nvidia_resiliency_ext", reason=NOT_HERE)
    if not hasattr(module, "__version__"):  # until 0.4; Megatron asks for 0.6
        pytest.skip(NOT_HERE)


def train(megatron, pytestconfig, where, fails, *words):
    """Return the status of each rank, what the last one printed of each step, and all that was printed."""
    where.mkdir(exist_ok=True)
    arguments = demo_arguments(iterations=4, global_batch_size=4, micro_batch_size=2, dropout=0.0)
    arguments += ["--save", str(where / "checkpoint"), "--save-interval", "100", "--ckpt-format", "torch"]
    command = [sys.executable, "-W", "ignore", "-m", "mindspeed_precision.testing.cpu", SCRIPT]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"FAILS": fails, "TORCH_CPP_LOG_LEVEL": "error"}
    logs = [where / f"log.{rank}" for rank in (0, 1)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("w") as file:
            ranks.append(
                subprocess.Popen(
                    [*command, *arguments, *RESTARTING, *words],
                    env=training_environment(megatron("0.17.1"), {**shared, "RANK": str(rank)}),
                    cwd=pytestconfig.rootpath,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        statuses = [rank.wait(240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return statuses, parse_log(logs[-1].read_text()), "".join(log.read_text() for log in logs)


def recording(run):
    return ["--precision-debug", "--precision-debug-out", str(run)]


def test_a_restart_in_process_is_told_apart_and_changes_nothing(megatron, pytestconfig, tmp_path):
    run, unbroken = tmp_path / "run", tmp_path / "unbroken"
    plain = train(megatron, pytestconfig, tmp_path / "plain", "1")
    seen = train(megatron, pytestconfig, tmp_path / "seen", "1", *recording(run))
    assert seen[0] == plain[0] == [0, 0], seen[2][-3000:]
    assert seen[1] == plain[1]
    assert len(seen[1]) == 2 + 4  # it begins anew, having no checkpoint
    joined = load_run(run)
    assert not load_run(run / "restart01").notes
    assert {path.name for path in run.iterdir()} == {"run.json", "rank00000", "rank00001", "restart01"}
    for rank in joined.ranks.values():
        assert rank.complete
        assert rank.steps == (INIT_STEP, 0, 1, 2, 3)
    assert any("restart01 began with step 0" in note for note in joined.notes)
    healthy = train(megatron, pytestconfig, tmp_path / "healthy", "none", *recording(unbroken))
    assert healthy[0] == [0, 0]
    assert compare_runs(unbroken, run, policy="exact").status is Verdict.IDENTICAL
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    again = train(megatron, pytestconfig, tmp_path / "again", "none", *recording(run))
    assert again[0] == [2, 2], again[2][-3000:]
    assert "the run directory is not empty, and nothing is overwritten" in again[2]
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before
