"""The commands that a launch becomes, and real launches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_precision.certify.launching import Launching
from mindspeed_precision.certify.running import certify_launch
from mindspeed_precision.errors import ConfigError, ExternalCommandError
from mindspeed_precision.launches import read_launch

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "mindspeed_precision" / "testing" / "demo"
COMMAND = ["torchrun", "--nproc-per-node", "8", "t.py", "--bf16", "--lr", "1"]


def arguments(run):
    return {one.name: list(one.values) for one in read_launch(run.words, run.environment).arguments.given}


def test_twice_is_the_same_launch_with_two_directories(tmp_path):
    first, second = Launching(COMMAND, out=tmp_path, environment={}).twice(steps=None)
    assert first.words[: len(COMMAND)] == tuple(COMMAND)
    assert [word.replace("second", "first") for word in second.words] == list(first.words)
    assert arguments(first)["precision-debug-out"] == [str(tmp_path / "first")]
    assert first.environment == {"PYTHONHASHSEED": "1234"}  # nothing inside the interpreter could set it
    kept = Launching(COMMAND, out=tmp_path, environment={"PYTHONHASHSEED": "7"}).twice(None)[0]
    assert kept.environment == {"PYTHONHASHSEED": "7"}


def test_settings_of_the_launch_are_kept(tmp_path):
    words = [*COMMAND, "--precision-debug-set", "capture.level=statistics", "stop_after=9", "--save", "mine"]
    run = Launching(words, out=tmp_path, environment={}).twice(steps=3)[0]
    assert read_launch(run.words, {}).arguments.last("precision_debug_set").values == (
        "capture.level=statistics",
        "stop_after=2",
    )
    assert arguments(run)["save"] == [
        str(tmp_path / "checkpoint-first")
    ]  # a user's checkpoint is not touched


def test_a_resume_is_three_runs(tmp_path):
    full, first, resumed = Launching(COMMAND, out=tmp_path, environment={}).resumed(at=2, steps=None)
    assert arguments(full)["precision-debug-set"] == ["stop_after=3"]
    assert (arguments(first)["save-interval"], arguments(first)["exit-interval"]) == (["2"], ["2"])
    assert arguments(first)["save"] == arguments(resumed)["load"] == [str(tmp_path / "checkpoint")]
    assert arguments(resumed)["precision-debug-set"] == ["stop_after=3"]
    assert "load" not in arguments(full)


def test_a_script_that_hands_arguments_on_is_started_itself(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text('export A=1\ntorchrun --nproc-per-node 2 t.py --bf16 "$@"\n')
    run = Launching([str(script), "--lr", "1"], out=tmp_path, environment={}).twice(None)[0]
    assert run.words[:4] == ("bash", str(script), "--lr", "1")
    assert "--precision-debug" in run.words


def test_a_script_that_does_not_is_replaced_by_what_it_starts(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text("export A=1\nTP=2\ntorchrun --nproc-per-node 2 t.py --tensor-model-parallel-size $TP\n")
    run = Launching([str(script)], out=tmp_path, environment={}).twice(None)[0]
    assert run.words[:6] == ("torchrun", "--nproc-per-node", "2", "t.py", "--tensor-model-parallel-size", "2")
    assert run.environment["A"] == "1"


@pytest.mark.parametrize(
    ("words", "call", "message"),
    [
        ([*COMMAND, "--finetune"], lambda launching: launching.resumed(2, None), "does not resume"),
        (COMMAND, lambda launching: launching.resumed(0, None), "nothing to resume"),
        (COMMAND, lambda launching: launching.twice(0), "no number of steps"),
        (COMMAND, lambda launching: launching.resumed(4, 4), "nothing to resume"),
        (["torchrun", "--nnodes", "2", "t.py"], lambda launching: None, "several machines"),
    ],
)
def test_what_cannot_be_certified_is_said(words, call, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        call(Launching(words, out=tmp_path, environment={}))


def test_a_script_to_which_nothing_can_be_added(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text("source set_env.sh\ntorchrun t.py --bf16\n")
    with pytest.raises(ConfigError, match="arguments cannot be added"):
        Launching([str(script)], out=tmp_path, environment={})


def test_a_directory_in_use_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(ConfigError, match="not an empty directory"):
        certify_launch(COMMAND, out=tmp_path)


def test_a_launch_that_fails_or_records_nothing(tmp_path):
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    fails = tmp_path / "fails.py"
    fails.write_text("raise SystemExit('no device here')\n")
    with pytest.raises(ExternalCommandError, match="no device here"):
        certify_launch([sys.executable, str(fails)], out=tmp_path / "a", environment=environment)
    idle = tmp_path / "idle.py"
    idle.write_text("")
    with pytest.raises(ExternalCommandError, match="recorded nothing"):
        certify_launch([sys.executable, str(idle)], out=tmp_path / "b", environment=environment)
    with pytest.raises(ExternalCommandError, match="could not be started"):
        certify_launch(["no-such-launcher-here", "t.py"], out=tmp_path / "c", environment=environment)


@pytest.fixture
def environment(megatron):
    python = Path(sys.executable).parent
    return {
        **os.environ,
        "PATH": f"{python}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(megatron("0.17.1"))]),
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "1",
    }


def training(*more):
    from mindspeed_precision.testing.demo.arguments import demo_arguments

    return [str(DEMO / "pretrain_gpt.py"), *demo_arguments(iterations=4, dropout=0.1), *more]


@pytest.mark.matrix
@pytest.mark.torch
@pytest.mark.megatron
def test_a_resume_of_megatron_is_certified_by_the_command(environment, tmp_path):
    """``launch/cpu.sh``, the real pretrain, its checkpoint: whole, first half, second half."""
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "mindspeed_precision",
                "certify",
                "--out",
                str(tmp_path / "out"),
                "--resume-at",
                "1",
            ),
            *("--", str(ROOT / "launch" / "cpu.sh"), *training("--ckpt-format", "torch")),
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert (told["certified"], told["bit_equal_through_step"], told["resumed_at_step"]) == (True, 1, 1)
    assert told["records"]["percent"] == 100.0
    assert told["launch"][0] == "bash"


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.megatron
def test_the_same_launch_twice_on_two_processes(environment, tmp_path):
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", "-m", "mindspeed_precision.testing.cpu"]
    certificate = certify_launch(
        [*command, *training("--tensor-model-parallel-size", "2")],
        out=tmp_path / "out",
        steps=2,
        environment=environment,
    )
    assert certificate.certified, certificate.statement
    assert (certificate.through, certificate.repetitions[0].steps) == (1, (0, 1))


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.megatron
@pytest.mark.parametrize(
    ("flag", "lost"),
    [
        ("--no-load-rng", ["determinism.resume_random_state"]),
        # Megatron loads the schedule with the optimizer
        ("--no-load-optim", ["determinism.resume_schedule", "determinism.resume_optimizer"]),
    ],
)
def test_what_megatron_was_told_not_to_load_is_named(environment, tmp_path, flag, lost):
    """The resumed run is started by hand with the flag, as a user who has three runs."""
    from mindspeed_precision.certify import certify_runs
    from mindspeed_precision.certify.running import _start

    command = ["torchrun", "--standalone", "--nproc-per-node", "1", "-m", "mindspeed_precision.testing.cpu"]
    launching = Launching(
        [*command, *training("--ckpt-format", "torch")], out=tmp_path, environment=environment
    )
    full, first, resumed = launching.resumed(at=1, steps=2)
    for run in (full, first):
        _start(run, tmp_path / f"{run.name}.log")
    lossy = type(resumed)(
        name=resumed.name, words=(*resumed.words, flag), environment=resumed.environment, out=resumed.out
    )
    _start(lossy, tmp_path / "resumed.log")
    certificate = certify_runs(full.out, first.out, resumed.out)
    assert not certificate.certified
    assert (certificate.through, [finding.id for finding in certificate.findings]) == (0, lost)
