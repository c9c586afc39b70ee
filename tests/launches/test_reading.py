"""A launch is read as its user writes it: a command, a script, a YAML file, arguments alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_precision.errors import ConfigError
from mindspeed_precision.launches import read_launch
from mindspeed_precision.launches.shell import read_script

ROOT = Path(__file__).parents[2]
SCRIPT = r"""#!/bin/bash
# export NOT_THIS=1
export CUDA_DEVICE_MAX_CONNECTIONS=1
source "/usr/local/Ascend/set_env.sh"
NPUS_PER_NODE=8
NNODES=2
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))
HCCL_DETERMINISTIC=true
TP=${TP:-2}
CKPT="a checkpoint"

cat <<'USAGE'
torchrun this is text
USAGE

DISTRIBUTED_ARGS="
    --nproc_per_node $NPUS_PER_NODE \
    --nnodes $NNODES
"
MOE_ARGS=(
    --num-experts 8   # eight
    --moe-router-topk 2
)
GPT_ARGS="
    --tensor-model-parallel-size ${TP} \
    --num-layers $((4 * TP)) \
    --load ${CKPT} \
    --seed ${SEED} \
    --bf16
"
if [[ -n "$X" ]]; then
  echo python is not started here
fi
NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 torchrun ${DISTRIBUTED_ARGS} pretrain_gpt.py \
    $GPT_ARGS "${MOE_ARGS[@]}" \
    --save "${CKPT}" --note 'a $b' \
    2>&1 | tee logs/train.log
export PYTHONHASHSEED=1
"""


def line_of(text):
    return SCRIPT[: SCRIPT.index(text)].count("\n") + 1


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    return path


def test_a_script_is_read_without_running_it(script):
    launch = read_launch([str(script)], {"HOME": "/h"})
    assert launch.head == ("torchrun", "--nproc_per_node", "8", "--nnodes", "2", "pretrain_gpt.py")
    assert (launch.launcher, launch.script, launch.world_size) == ("torchrun", "pretrain_gpt.py", 16)
    found = {argument.name: argument.values for argument in launch.arguments.given}
    assert found == {
        "tensor-model-parallel-size": ("2",),
        "num-layers": ("8",),
        "load": ("a",),
        "seed": ("${SEED}",),
        "bf16": (),
        "num-experts": ("8",),
        "moe-router-topk": ("2",),
        "save": ("a checkpoint",),
        "note": ("a $b",),
    }
    assert launch.arguments.stray == ("checkpoint",)  # as a shell splits what is not quoted
    assert launch.source == f"{script}:{line_of('NVTE_ALLOW')}"


def test_what_a_script_exports_and_when(script):
    launch = read_launch([str(script)], {})
    assert launch.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert launch.environment["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
    assert "HCCL_DETERMINISTIC" not in launch.environment
    assert "HCCL_DETERMINISTIC" in launch.unexported
    assert launch.late == {"PYTHONHASHSEED": f"{script}:{line_of('export PYTHONHASH')}"}
    assert launch.sourced == (f"/usr/local/Ascend/set_env.sh ({script}:4)",)
    # what came with the environment stays exported when a script sets it again
    assert read_launch([str(script)], {"HCCL_DETERMINISTIC": "0"}).environment["HCCL_DETERMINISTIC"] == "true"


def test_words_are_those_of_a_shell(tmp_path):
    """Whatever bash would start with: one line, each way to quote."""
    line = r"""A="x y"; B=(1 "2 3" $A); python t.py --a $A --b "$A" --c "${B[@]}" --d 'q"$A' --e a\ b \
  --f $((2*3+1)) --g ${U:-d} --h "${A}z" --i \
  --j"""
    shown = subprocess.run(
        ["bash", "-c", line.replace("python t.py", r"printf '%s\0'")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (command,) = read_script(line, [], {}).commands
    assert list(command.words[2:]) == shown.split("\0")[:-1]


@pytest.mark.parametrize(
    ("words", "launcher", "script", "world", "arguments"),
    [
        (
            ["torchrun", "--standalone", "--nproc-per-node=4", "t.py", "--bf16"],
            "torchrun",
            "t.py",
            4,
            ["--bf16"],
        ),
        (["msrun", "--worker_num=8", "--join=True", "t.py", "--bf16"], "msrun", "t.py", 8, ["--bf16"]),
        (
            ["python", "-m", "torch.distributed.run", "--nproc-per-node", "2", "t.py"],
            "torchrun",
            "t.py",
            2,
            [],
        ),
        (["python3.11", "-u", "t.py", "--lr", "-1"], "", "t.py", 1, ["--lr", "-1"]),
        (["t.py", "--lr=1e-3"], "", "t.py", 1, ["--lr=1e-3"]),
        (["--lr", "1e-3"], "", "", None, ["--lr", "1e-3"]),
        (["env", "A=1", "torchrun", "--nproc-per-node", "gpu", "t.py"], "torchrun", "t.py", None, []),
        (
            [
                "torchrun",
                "--nproc-per-node",
                "2",
                "-m",
                "mindspeed_precision.testing.cpu",
                "a.py",
                "b.py",
                "--x",
            ],
            *("torchrun", "b.py", 2, ["--x"]),
        ),
    ],
)
def test_a_command_is_taken_apart(words, launcher, script, world, arguments):
    launch = read_launch(words, {})
    assert (launch.launcher, launch.script, launch.world_size) == (launcher, script, world)
    assert launch.arguments.words() == arguments
    assert launch.words() == words


def test_our_own_launch_scripts_hand_over_what_they_are_given():
    launch = read_launch([str(ROOT / "launch" / "torch_npu.sh"), "t.py", "--bf16"], {"NPROC": "4"})
    assert (launch.script, launch.world_size, launch.arguments.words()) == ("t.py", 4, ["--bf16"])
    assert launch.environment["ATB_MATMUL_SHUFFLE_K_ENABLE"] == "0"
    launch = read_launch([str(ROOT / "launch" / "cpu.sh"), "t.py", "--bf16"], {})
    assert (launch.script, launch.world_size) == ("t.py", 1)
    assert "mindspeed_precision.testing.cpu" in launch.head


def test_a_script_that_starts_a_script(tmp_path, script):
    outer = tmp_path / "outer.sh"
    outer.write_text("export PYTHONHASHSEED=7\nbash train.sh --more\n")
    launch = read_launch([str(outer)], {})
    assert launch.environment["PYTHONHASHSEED"] == "7"
    assert launch.script == "pretrain_gpt.py"


def test_yaml(tmp_path):
    path = tmp_path / "arguments.yaml"
    path.write_text(
        "model:\n  num_layers: 4\n  add_bias_linear: false\n  layernorm_epsilon: 1.0e-6\n"
        "bf16: true\nfp16: false\ndata_path: [a, b]\nload: null\n"
    )
    arguments = read_launch([str(path)], {}).arguments
    assert (arguments.value("num_layers"), arguments.on("bf16"), arguments.on("fp16")) == (4, True, False)
    assert arguments.value("add_bias_linear") is False
    assert arguments.value("layernorm_epsilon") == 1e-6
    assert arguments.value("data_path") == ("a", "b")
    joined = read_launch(["t.py", "--yaml-cfg", str(path), "--num-layers", "8"], {}).arguments
    assert (joined.value("num_layers"), joined.on("bf16")) == (8, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no launch was given"),
        (["no/such.sh"], "cannot be read"),
        (["no/such.yaml"], "cannot be read"),
    ],
)
def test_bad_input_is_one_clear_error(words, message):
    with pytest.raises(ConfigError, match=message):
        read_launch(words, {})


def test_a_script_that_starts_nothing_is_said_to(tmp_path):
    path = tmp_path / "empty.sh"
    path.write_text("export A=1\necho hello\n")
    with pytest.raises(ConfigError, match="starts no training"):
        read_launch([str(path)], {})


def test_values_can_be_changed_in_place():
    arguments = read_launch(["t.py", "--lr", "1", "--bf16", "--lr=2"], {}).arguments
    changed = arguments.having({"lr": ["3"], "seed": ["4"]})
    assert changed.words() == ["--bf16", "--lr", "3", "--seed", "4"]
    assert arguments.without(["lr"]).words() == ["--bf16"]


def test_reading_imports_no_framework():
    program = (
        "import sys; from mindspeed_precision.preflight import preflight; "
        "preflight(['t.py', '--bf16']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
