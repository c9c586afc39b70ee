"""The launch scripts export what the table says, before anything starts, and then hand over."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_precision.determinism.environment import ENVIRONMENT, RECORDED, Status, judge
from mindspeed_precision.determinism.progress import Deadline, Progress
from mindspeed_precision.testing.demo.command import CASES

LAUNCH = Path(__file__).parents[2] / "launch"
DEVICE = {
    "torch_npu.sh": "npu",
    "mindspore.sh": "npu",
    "gpu.sh": "cuda",
    "cpu.sh": "cpu",
    "mindspore_cpu.sh": "cpu",
    "demo.sh": "cpu",
}
STARTER = {
    "torch_npu.sh": "torchrun",
    "mindspore.sh": "msrun",
    "gpu.sh": "torchrun",
    "cpu.sh": "torchrun",
    "mindspore_cpu.sh": "python3",
    "demo.sh": "python3",
    "compare.sh": "python3",
}
LAYER = LAUNCH.parent / "mindspeed_precision" / "testing" / "mindtorch" / "__main__.py"
SCRIPTS = sorted(path.name for path in LAUNCH.glob("*.sh"))
EXAMPLES = sorted(path.name for path in (LAUNCH / "examples").glob("*.sh"))
SHELL_FILES = sorted(str(path.relative_to(LAUNCH)) for path in LAUNCH.rglob("*") if path.is_file())
EVERYTHING_PASSED = dict.fromkeys(Deadline, "over")
EXPORT = re.compile(r'^export (\w+)=(?:"\$\{(\w+):-(.*)\}"|(\S+))(?: #.*)?$', re.MULTILINE)


def exports(script: str) -> dict[str, str]:
    """Return what ``script`` exports where the user has set nothing."""
    text = (LAUNCH / script).read_text()
    found = {}
    for name, inner, default, literal in EXPORT.findall(text):
        assert inner in ("", name), f"{script}: {name} defaults to the value of {inner}"
        found[name] = default or literal
    assert len(found) == text.count("\nexport "), f"{script}: an export that this test cannot read"
    return found


@pytest.fixture
def run(tmp_path):
    """Run a script with stand-ins for what it starts; they print how they were called."""
    for name in set(STARTER.values()):
        stand_in = tmp_path / name
        stand_in.write_text(
            '#!/bin/bash\nenv -0\nprintf "ARGV=%s\\0" "$(basename "$0")"\nprintf "%s\\0" "$@"\n'
        )
        stand_in.chmod(0o755)

    for name in ("x.py", "a script.py"):
        (tmp_path / name).touch()

    def start(script: str, *args: str, **environment: str) -> tuple[dict[str, str], list[str]]:
        done = subprocess.run(
            [str(LAUNCH / script), *args],
            cwd=tmp_path,
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        before, _, after = done.stdout.partition("ARGV=")
        pairs = [entry.split("=", 1) for entry in before.split("\0") if "=" in entry]
        return dict(pairs), after.split("\0")[:-1]

    return start


def test_every_script_is_checked_here():
    assert sorted(STARTER) == SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS)
def test_without_arguments_it_says_how_to_use_it(script):
    done = subprocess.run([str(LAUNCH / script)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"usage: launch/{script} ")
    assert done.stdout == ""


@pytest.mark.parametrize("script", SHELL_FILES)
def test_syntax(script):
    subprocess.run(["bash", "-n", str(LAUNCH / script)], check=True)


@pytest.mark.parametrize("script", SHELL_FILES)
def test_shellcheck(script):
    shellcheck = Path(sys.executable).parent / "shellcheck"
    program = str(shellcheck) if shellcheck.exists() else shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed here")
    command = [program, "--external-sources", f"launch/{script}"]
    done = subprocess.run(command, cwd=LAUNCH.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", sorted(DEVICE))
def test_exports_are_those_of_the_table(script):
    found = exports(script)
    wanted = {row.name: row.value for row in ENVIRONMENT if DEVICE[script] in row.devices}
    assert {name: value for name, value in found.items() if name not in RECORDED} == wanted


@pytest.mark.parametrize("script", sorted(DEVICE))
def test_what_it_starts_finds_nothing_left_to_pin(run, script):
    # a fresh toolkit shell: its set_env.sh has switched the shuffle of K on
    environment, _ = run(script, "x.py", ATB_MATMUL_SHUFFLE_K_ENABLE="1")
    now = Progress(passed=EVERYTHING_PASSED, start_environment=environment)
    for row in ENVIRONMENT:
        outcome = judge(row, DEVICE[script], environment.get(row.name), now)
        assert outcome.status in (Status.ALREADY_RIGHT, Status.NOT_APPLICABLE), outcome


def test_the_user_may_choose_among_what_is_as_good(run):
    environment, _ = run("torch_npu.sh", "x.py", HCCL_DETERMINISTIC="strict", PYTHONHASHSEED="0")
    assert (environment["HCCL_DETERMINISTIC"], environment["PYTHONHASHSEED"]) == ("strict", "0")


@pytest.mark.parametrize(
    ("script", "environment", "argv"),
    [
        (
            "torch_npu.sh",
            {"NPROC": "4", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "7"},
            "torchrun --nproc-per-node 4 --nnodes 2 --node-rank 1 --master-addr head --master-port 7",
        ),
        (
            "gpu.sh",
            {},
            "torchrun --nproc-per-node 8 --nnodes 1 --node-rank 0 --master-addr localhost --master-port 6000",
        ),
        (
            "mindspore.sh",
            {"NPROC": "4", "NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"},
            "msrun --worker_num 8 --local_worker_num 4 --node_rank 0 --master_addr 127.0.0.1 "
            "--master_port 6000 --log_dir msrun_log --join=True",
        ),
        (
            "cpu.sh",
            {"NPROC": "2"},
            "torchrun --standalone --nproc-per-node 2 -m mindspeed_precision.testing.cpu",
        ),
        ("mindspore_cpu.sh", {}, "python3 -m mindspeed_precision.testing.mindtorch"),
        ("mindspore.sh", {"MSP_DEVICE": "cpu"}, "python3 -m mindspeed_precision.testing.mindtorch"),
        (
            "mindspore_cpu.sh",
            {"NPROC": "2", "MSRUN_LOG_DIR": "logs"},
            "msrun --worker_num 2 --local_worker_num 2 --master_addr 127.0.0.1 --master_port 8118 "
            f"--log_dir logs --join=True {LAYER}",
        ),
        ("compare.sh", {}, "python3 -m mindspeed_precision compare"),
        ("demo.sh", {}, "python3 -m mindspeed_precision demo"),
    ],
)
def test_arguments_are_handed_over_untouched(run, script, environment, argv):
    passed = ["a script.py", "--data", "with  two blanks", "--flag=$HOME"]
    _, found = run(script, *passed, **environment)
    assert found == [*argv.split(), *passed]


def test_msrun_finds_the_interpreter_and_the_package(run, tmp_path):
    """Both are found on the PATH and on PYTHONPATH by the workers that msrun starts."""
    environment, _ = run(
        "mindspore_cpu.sh", "x.py", NPROC="2", PYTHON=str(tmp_path / "python3"), PYTHONPATH="mine"
    )
    assert environment["PATH"].startswith(f"{tmp_path}:")
    assert environment["PYTHONPATH"] == f"{LAUNCH.parent}:mine"


def test_another_device_is_not_taken_for_an_npu():
    done = subprocess.run(
        [str(LAUNCH / "mindspore.sh"), "x.py"],
        env={**os.environ, "MSP_DEVICE": "gpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "launch/mindspore.sh: MSP_DEVICE is gpu, expected npu or cpu\n"


def test_every_case_of_the_demo_is_named():
    done = subprocess.run([str(LAUNCH / "demo.sh")], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert all(case in done.stderr for case in CASES)
