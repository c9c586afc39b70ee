"""What a launch script would run, without running it; and what it refuses.

``dry_runs/`` holds the whole output of each script; after a change on purpose, ``MSP_ACCEPT=1 pytest FILE``
writes them anew, to be read before they are committed.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from mindspeed_precision.launches import read_launch

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
EXPECTED = Path(__file__).parent / "dry_runs"
PATHS = {"DATA_PATH": "data/text_document", "TOKENIZER_PATH": "tokenizer", "CKPT_LOAD_DIR": "a checkpoint"}
ODD = ("train.py", "--data", "with  two blanks", "--flag=$HOME", "--quote", "it's", "--precision-debug")
SEVERAL = {"NPROC": "4", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "7000"}
CASES = {
    "torch_npu": ("torch_npu.sh", ODD, {}),
    "torch_npu_nodes": ("torch_npu.sh", ODD, SEVERAL),
    "gpu": ("gpu.sh", ODD, {}),
    "mindspore": ("mindspore.sh", (*ODD, "--ai-framework", "mindspore"), {}),
    "mindspore_nodes": ("mindspore.sh", ODD, SEVERAL),
    "cpu": ("cpu.sh", ("--without", "fused_adam", *ODD), {"NPROC": "2"}),
    "mindspore_cpu": ("mindspore_cpu.sh", ODD, {}),
    "mindspore_cpu_nproc": ("mindspore.sh", ODD, {"MSP_DEVICE": "cpu", "NPROC": "2"}),
    "compare": ("compare.sh", ("runs/a b", "runs/c", "--policy", "exact"), {"PYTHON": "python3"}),
    "demo": ("demo.sh", ("glm4",), {}),
    **{f"glm4_9b_8k_{side}": (f"examples/glm4_9b_8k_{side}.sh", ("--train-iters", "3"), PATHS)
       for side in ("pta", "mindspore")},
    **{f"{name}_{side}": (f"examples/{name}_{side}.sh", (), PATHS)
       for name in ("qwen3_0point6b_4k", "deepseek3_1b_4k") for side in ("pta", "mindspore")},
}  # fmt: skip


def start(script, *words, cwd=None, dry=True, **environment):
    """Run a script in an environment that holds PATH alone, and what is given."""
    return subprocess.run(
        [str(LAUNCH / script), *words],
        cwd=cwd,
        env={"PATH": os.environ["PATH"], **({"MSP_DRY_RUN": "1"} if dry else {}), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def directory(tmp_path):
    for name in ("train.py", "pretrain_gpt.py"):
        (tmp_path / name).write_text("raise SystemExit('it was run')\n")
    return tmp_path


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_dry_run_prints_exactly_what_would_run(case, directory):
    script, words, environment = CASES[case]
    done = start(script, *words, cwd=directory, **environment)
    assert done.returncode == 0, done.stderr
    told = done.stdout.replace(str(ROOT), "$ROOT")
    expected = EXPECTED / f"{case}.txt"
    if os.environ.get("MSP_ACCEPT"):
        expected.write_text(told)
    assert told == expected.read_text()
    assert sorted(path.name for path in directory.iterdir()) == ["pretrain_gpt.py", "train.py"]


def test_every_script_and_example_has_a_dry_run():
    scripts = {str(path.relative_to(LAUNCH)) for path in LAUNCH.rglob("*.sh")}
    assert scripts == {script for script, _, _ in CASES.values()}


@pytest.mark.parametrize(
    ("script", "starter"), [("torch_npu.sh", "torchrun"), ("mindspore.sh", "msrun"), ("gpu.sh", "torchrun")]
)
def test_the_lines_do_what_the_script_does(script, starter, directory):
    """A stand-in for the launcher writes what it is given, by the script and by its dry run."""
    stand_in = directory / "bin" / starter
    stand_in.parent.mkdir()
    stand_in.write_text(
        '#!/bin/bash\nenv | grep -v "^\\(_\\|SHLVL\\|MSP_DRY_RUN\\)=" | sort\nprintf "<%s>\\n" "$@"\n'
    )
    stand_in.chmod(0o755)
    path = {"PATH": f"{stand_in.parent}:{os.environ['PATH']}"}
    real = start(script, *ODD, cwd=directory, dry=False, **SEVERAL, **path)
    lines = start(script, *ODD, cwd=directory, **SEVERAL, **path).stdout
    fed = subprocess.run(
        ["bash"],
        input=lines,
        cwd=directory,
        env={**path, **SEVERAL},
        capture_output=True,
        text=True,
        check=True,
    )
    assert real.returncode == 0
    assert fed.stdout == real.stdout
    assert "<with  two blanks>" in fed.stdout


@pytest.mark.parametrize("name", ["glm4_9b_8k", "qwen3_0point6b_4k", "deepseek3_1b_4k"])
def test_the_two_sides_of_an_example_train_the_same(name, directory):
    """Their arguments are equal but for what must differ."""
    given = {}
    for side in ("pta", "mindspore"):
        planned = directory / f"{side}.sh"
        planned.write_text(start(f"examples/{name}_{side}.sh", cwd=directory, **PATHS).stdout)
        launch = read_launch([str(planned)], {})
        assert (launch.script, launch.world_size) == ("pretrain_gpt.py", 8)
        given[side] = {argument.name: argument.values for argument in launch.arguments.given}
    model = name.partition("_")[0]
    assert given["pta"].pop("precision-debug-out") == (f"runs/{model}-pta",)
    assert given["mindspore"].pop("precision-debug-out") == (f"runs/{model}-mindspore",)
    assert given["mindspore"].pop("ai-framework") == ("mindspore",)
    assert given["pta"] == given["mindspore"]
    assert given["pta"]["load"] == ("a checkpoint",)


def test_what_is_not_on_this_machine_is_a_note_in_a_dry_run(tmp_path):
    (tmp_path / "bin").mkdir()
    for program in ("bash", "env", "dirname", "basename", "sed"):
        (tmp_path / "bin" / program).symlink_to(f"/usr/bin/{program}")
    path = str(tmp_path / "bin")
    done = start("torch_npu.sh", "absent.py", cwd=tmp_path, PATH=path)
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        f"launch/torch_npu.sh: note: no such script: absent.py (looked in {tmp_path})",
        "launch/torch_npu.sh: note: torchrun is not on PATH: it comes with torch: activate the environment "
        "in which you train",
    ]
    (tmp_path / "there.py").touch()
    for script, program in (("torch_npu.sh", "torchrun"), ("mindspore.sh", "msrun"), ("cpu.sh", "torchrun")):
        done = start(script, "there.py", cwd=tmp_path, dry=False, PATH=path)
        assert done.returncode == 2
        assert done.stderr.startswith(f"launch/{script}: {program} is not on PATH: ")


@pytest.mark.parametrize("script", ["torch_npu.sh", "mindspore.sh", "gpu.sh"])
@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"NPROC": "eight"}, "NPROC is eight, expected a number of processes"),
        ({"NPROC": "0"}, "NPROC is 0, expected a number of processes"),
        ({"NPROC": "2+x"}, "NPROC is 2+x, expected a number of processes"),
        ({"NNODES": "1:4"}, "NNODES is 1:4, expected a number of nodes"),
        (
            {"NNODES": "2", "NODE_RANK": "0"},
            "NNODES is 2 and MASTER_ADDR is not set, expected the address of the node whose NODE_RANK is 0",
        ),
        (
            {"NNODES": "2", "MASTER_ADDR": "head"},
            "NNODES is 2 and NODE_RANK is not set, expected 0 to 1, another on each node",
        ),
        (
            {"NNODES": "2", "MASTER_ADDR": "head", "NODE_RANK": "2"},
            "NODE_RANK is 2, expected 0 to 1, since NNODES is 2",
        ),
        ({"NODE_RANK": "1"}, "NODE_RANK is 1, expected 0 to 0, since NNODES is 1"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is http, expected a port, 1 to 65535"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is 65536, expected a port, 1 to 65535"),
        ({"MSP_DRY_RUN": "yes"}, "MSP_DRY_RUN is yes, expected 1 or 0"),
    ],
)
def test_what_cannot_be_started_is_one_line(script, environment, said, directory):
    done = start(script, "absent.py", cwd=directory, **environment)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"launch/{script}: {said}\n")


ALL = ["torch_npu.sh", "mindspore.sh", "gpu.sh", "cpu.sh", "mindspore_cpu.sh"]
SIZES = (
    "--tensor-model-parallel-size",
    "2",
    "--pipeline-model-parallel-size=2",
    "--context-parallel-size",
    "1",
)


@pytest.mark.parametrize("script", ALL)
def test_processes_that_do_not_fit_the_layout_are_one_line(script, directory):
    done = start(script, "train.py", *SIZES, cwd=directory, NPROC="6")
    said = (
        f"launch/{script}: NPROC is 6, expected a multiple of 4 processes: --tensor-model-parallel-size 2 x "
        "--pipeline-model-parallel-size 2 x --context-parallel-size 1\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
    for fitting in ("4", "8"):
        assert start(script, "train.py", *SIZES, cwd=directory, NPROC=fitting).returncode == 0


def test_experts_need_their_ranks(directory):
    sizes = ("--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "4")
    done = start("gpu.sh", "train.py", *sizes, cwd=directory, NPROC="4")
    assert "NPROC is 4, expected a multiple of 8 processes" in done.stderr
    assert start("gpu.sh", "train.py", *sizes, cwd=directory, NPROC="8").returncode == 0


def test_processes_of_all_nodes_count(directory):
    nodes = {**SEVERAL, "NPROC": "2"}
    assert start("gpu.sh", "train.py", *SIZES, cwd=directory, **nodes).returncode == 0
    done = start("gpu.sh", "train.py", *SIZES, cwd=directory, **{**nodes, "NPROC": "3"})
    assert done.stderr.startswith(
        "launch/gpu.sh: NPROC is 3 and NNODES 2, expected a multiple of 4 processes"
    )


def test_an_example_says_where_its_layout_does_not_fit(directory):
    done = start("examples/glm4_9b_8k_pta.sh", cwd=directory, NPROC="2", **PATHS)
    assert (done.returncode, done.stdout) == (2, "")
    assert "NPROC is 2, expected a multiple of 4 processes" in done.stderr


@pytest.mark.parametrize("script", ["cpu.sh", "mindspore_cpu.sh"])
def test_several_nodes_are_refused_where_there_is_one(script, directory):
    done = start(script, "train.py", cwd=directory, NNODES="2")
    said = f"launch/{script}: NNODES is 2, expected 1: this script starts processes on one machine alone\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.mark.parametrize("script", ALL)
def test_a_script_that_is_not_there_is_one_line(script, tmp_path):
    done = start(script, "absent.py", cwd=tmp_path, dry=False)
    said = f"launch/{script}: no such script: absent.py (looked in {tmp_path})\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.mark.parametrize("number", ["0", "x", "-1", "1.5", "2+x"])
@pytest.mark.parametrize("script", ["cpu.sh", "mindspore_cpu.sh"])
def test_a_number_of_processes_that_is_none_is_one_line(script, number, directory):
    done = start(script, "train.py", cwd=directory, dry=False, NPROC=number)
    said = f"launch/{script}: NPROC is {number}, expected a number of processes\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_an_example_says_what_it_must_be_told(directory):
    done = start("examples/glm4_9b_8k_pta.sh", cwd=directory, DATA_PATH="d", TOKENIZER_PATH="t")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "launch/examples/glm4_9b_8k_pta.sh: CKPT_LOAD_DIR is not set, expected a path"
    )


def test_preflight_reads_what_a_dry_run_prints(directory):
    """``preflight -- planned.sh``: what the lines export counts as set in time."""
    planned = directory / "planned.sh"
    planned.write_text(start("examples/glm4_9b_8k_pta.sh", cwd=directory, **PATHS).stdout)
    launch = read_launch([str(planned)], {})
    assert launch.environment["HCCL_DETERMINISTIC"] == "true"
    assert launch.arguments.last("num_layers").values == ("40",)
    assert not launch.late
    assert not launch.unexported
