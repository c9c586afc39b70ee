"""Megatron's rerun machine, an exception of the user, a training that is called again: all as without us."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.records import INIT_STEP
from mindspeed_precision.testing.demo.arguments import demo_arguments
from mindspeed_precision.testing.demo.launch import free_port, parse_log, training_environment

pytestmark = [pytest.mark.torch, pytest.mark.megatron, pytest.mark.matrix]

SCRIPT = Path(__file__).parent / "scripts" / "megatron_fails.py"


def train(megatron, fails, save, *, out=None, mode="disabled"):
    """Return exit status, what each step printed, and all that was printed."""
    arguments = demo_arguments(iterations=4, global_batch_size=4, micro_batch_size=2, dropout=0.0)
    arguments += [
        "--rerun-mode",
        mode,
        "--save",
        str(save),
        "--save-interval",
        "100",
        "--ckpt-format",
        "torch",
    ]
    if out is not None:
        arguments += ["--precision-debug", "--precision-debug-out", str(out)]
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "mindspeed_precision.testing.cpu",
        str(SCRIPT),
        *arguments,
    ]
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    environment = {**training_environment(megatron("0.17.1"), {**alone, "FAILS": fails})}
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=300,
    )
    return done.returncode, parse_log(done.stdout), done.stdout


def ours(text):
    """Return our lines that tell of a failure."""
    return [
        line
        for line in text.splitlines()
        if line.startswith("mindspeed-precision:") and "capture ends" in line
    ]


@pytest.mark.parametrize(
    ("fails", "mode", "status"),
    [
        ("nan", "disabled", 1),  # it raises
        (
            "nan",
            "validate_results",
            16,
        ),  # resume elsewhere, to tell a fault of the device from one of the code
        ("once", "validate_results", 17),
        ("error", "disabled", 1),
    ],
)
def test_megatron_stops_as_it_would(megatron, tmp_path, fails, mode, status):
    plain = train(megatron, fails, tmp_path / "plain", mode=mode)
    seen = train(megatron, fails, tmp_path / "seen", mode=mode, out=tmp_path / "run")
    assert seen[0] == plain[0] == status, seen[2][-3000:]
    assert seen[1] == plain[1]
    assert len(seen[1]) == 2
    assert ours(seen[2]) == []
    run = load_run(tmp_path / "run")
    assert not run.ranks[0].complete
    assert run.ranks[0].steps[:3] == (INIT_STEP, 0, 1)
    assert "coverage.capture_ended" not in str(run.manifest["findings"])


def test_a_training_that_is_called_again_is_recorded_apart(megatron, tmp_path):
    plain = train(megatron, "again", tmp_path / "plain")
    seen = train(megatron, "again", tmp_path / "seen", out=tmp_path / "run")
    assert (seen[0], plain[0]) == (0, 0), seen[2][-3000:]
    assert seen[1] == plain[1]
    assert len(seen[1]) == 2 + 4  # it begins anew, having no checkpoint
    run = load_run(tmp_path / "run")
    assert run.ranks[0].complete
    assert run.ranks[0].steps == (INIT_STEP, 0, 1, 2, 3)
    assert any("restart01 began with step 0" in note for note in run.notes)
    restart = load_run(tmp_path / "run" / "restart01")
    assert not [line for line in restart.manifest["patches"] if line["problem"]]
    calls = {line["name"]: line["calls"] for line in restart.manifest["patches"]}
    assert calls["train_step"] in (1, 4)  # seen once by each session, not by two
    assert restart.manifest["findings"] == []
