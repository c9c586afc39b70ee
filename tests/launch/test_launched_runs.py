"""The launch scripts that this machine can run, run: on CPU processes, with torch and with MindSpore."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_precision import load_run
from mindspeed_precision.testing.demo.arguments import demo_arguments
from mindspeed_precision.testing.demo.launch import free_port

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SCRIPT = ROOT / "mindspeed_precision" / "testing" / "demo" / "pretrain_gpt.py"


def start(script, *words, python, **environment):
    path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [str(LAUNCH / script), *words],
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def told(text):
    """Return the lines of this package, as they stand in a log."""
    return re.findall(r"^mindspeed-precision: (.*)$", text, re.MULTILINE)


@pytest.mark.matrix
@pytest.mark.torch
@pytest.mark.megatron
def test_cpu_sh_runs_the_demo_script_and_compare_sh_compares_it(megatron, tmp_path):
    pytest.importorskip("torch")
    run, boards = tmp_path / "run", tmp_path / "boards"
    done = start(
        "cpu.sh",
        str(SCRIPT),
        *demo_arguments(iterations=2, tp=2, dropout=0.0),
        *("--precision-debug", "--precision-debug-out", str(run)),
        *("--precision-debug-set", f"export.tensorboard={boards}"),
        python=sys.executable,
        NPROC="2",
        PYTHONPATH=f"{ROOT}{os.pathsep}{megatron('0.17.1')}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = told(done.stdout + done.stderr)
    assert len(lines) == 3, lines  # of two ranks one speaks; nothing is wrong
    assert lines[0].startswith(f"recording to {run}: every step, 2 of 2 ranks, level statistics; about ")
    assert lines[0].endswith("4 microbatches")
    assert lines[1].startswith(f"recorded 2 steps (0 to 1) to {run}; rank 0 (of 2 that recorded): ")
    assert lines[1].endswith("dW of 27 of 27 trainable parameters seen in every microbatch")
    assert lines[2] == (f"next: mindspeed-precision check {run}; mindspeed-precision compare BASELINE {run}")
    recorded = load_run(run)
    assert all(rank.complete for rank in recorded.ranks.values())
    # what was expected is about what came: records of a step, and their bytes
    said = int(re.search(r"about ([\d ]+) records", lines[0])[1].replace(" ", ""))
    really = sum(record.key.step == 1 for record in recorded.ranks[0].records)
    assert 0.7 < said / really < 1.4
    assert sorted(path.name for path in (boards / "run").iterdir()) == ["rank00000", "rank00001"]

    compared = start("compare.sh", str(run), str(run), "--out", str(tmp_path / "c"), python=sys.executable,
                     PYTHON=sys.executable, PYTHONPATH=str(ROOT))  # fmt: skip
    assert compared.returncode == 0, compared.stderr
    assert compared.stdout.startswith("IDENTICAL: ")
    assert "huawei    passed: " in compared.stdout


@pytest.mark.matrix
def test_mindspore_sh_runs_the_demo_script_through_msrun(mindspore_python, tmp_path):
    run = tmp_path / "run"
    done = start(
        "mindspore.sh",
        str(SCRIPT),
        *demo_arguments(iterations=2, tp=2, dropout=0.0),
        *("--precision-debug", "--precision-debug-out", str(run)),
        python=mindspore_python,
        MSP_DEVICE="cpu",
        NPROC="2",
        PYTHON=str(mindspore_python),
        PYTHONPATH=str(ROOT),
        MASTER_PORT=str(free_port()),
        MSRUN_LOG_DIR=str(tmp_path / "ranks"),
    )
    log = (
        done.stdout + done.stderr + "".join(p.read_text() for p in (tmp_path / "ranks").glob("worker_*.log"))
    )
    assert done.returncode == 0, log[-4000:]
    lines = told(log)
    assert any(line.startswith(f"recording to {run}: every step, 2 of 2 ranks") for line in lines), lines
    assert any(line.startswith(f"recorded 2 steps (0 to 1) to {run}; ") for line in lines), lines
    recorded = load_run(run)
    assert recorded.framework == "mindspore"
    assert sorted(recorded.ranks) == [0, 1]
    assert all(rank.complete and set(rank.steps) == {-1, 0, 1} for rank in recorded.ranks.values())
