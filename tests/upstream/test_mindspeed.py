"""Real MindSpeed and Megatron-LM core_v0.12.1 on this CPU: our patches come last, and stay or are named.

What computes here is torch's CPU, behind a stand-in for torch_npu that computes nothing. It proves the
patches and the flow, not an NPU's numbers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.records import Phase, Role
from mindspeed_precision.testing.demo.arguments import demo_arguments
from mindspeed_precision.testing.demo.launch import SCRIPT, run_training

pytestmark = [pytest.mark.long, pytest.mark.torch, pytest.mark.megatron]

SCRIPTS = Path(__file__).parent / "scripts"
SEES = {"outermost", "covered"}


@pytest.fixture(scope="module")
def audits(mindspeed):
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPTS / "patched_again.py")],
        env={**os.environ, **mindspeed, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "a stand-in for tests" in ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def lost(audit):
    return {name for name, (status, _) in audit.items() if status not in SEES | {"not applicable"}}


def test_mindspeed_has_patched_before(audits):
    assert audits["applied"] == audits["registered"] > 80


def test_every_patch_finds_its_target_in_what_mindspeed_left(audits):
    assert not lost(audits["installed"])
    seeing = {name for name, (status, _) in audits["installed"].items() if status in SEES}
    assert {"linear_forward", "linear_backward", "chained_step", "train_step", "fused_gemm_fp32"} <= seeing


def test_applying_again_changes_nothing(audits):
    assert audits["applied again"] == audits["installed"]


def test_a_later_feature_covers_ours_or_is_named_for_displacing_it(audits):
    after = audits["another feature"]
    assert after["train_step"][0] == "covered"  # MindSpeed met ours there first, and wraps it
    assert lost(after) == {"chained_step"}  # MindSpeed goes back to what it met there, before us
    assert "was replaced by" in after["chained_step"][1]
    assert "chained_step" in audits["refusal"]


def test_after_repatch_what_mindspeed_took_back_is_named(audits):
    gone = lost(audits["repatched"])
    assert gone == {"all_reduce", "chained_step"}
    assert all(audits["repatched"][name][1] for name in gone)


def train(directory, environment, *, under, processes=1, llm=False, **options):
    """Record two steps of the demo's script, behind MindSpeed or on Megatron alone."""
    arguments = demo_arguments(iterations=2, dropout=0.0, **options)
    arguments += ["--precision-debug", "--precision-debug-out", str(directory / "run")]
    script, words = (SCRIPTS / "under_mindspeed.py", [str(SCRIPT)]) if under else (SCRIPT, [])
    log = directory / "log"
    environment = {**environment, "MSP_MINDSPEED_LLM": os.environ["MSP_MINDSPEED_LLM"] if llm else ""}
    run_training(script, [*words, *arguments], processes=processes, environment=environment, log=log)
    return load_run(directory / "run")


@pytest.mark.parametrize(
    ("processes", "options"),
    [
        (1, {}),
        (2, {"tp": 2, "sequence_parallel": True}),
        (2, {"distributed_optimizer": True, "overlap": True, "dtype": "bf16"}),
    ],
    ids=["one process", "tensor and sequence parallel", "distributed optimizer"],
)
def test_a_run_behind_mindspeed_is_recorded_whole(tmp_path, mindspeed, processes, options):
    run = train(tmp_path, mindspeed, under=True, processes=processes, **options)
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    assert all(rank.complete for rank in run.ranks.values())
    assert manifest["findings"] == []
    assert manifest["versions"]["torch_npu"] == "0.0.0+cpu-stand-in"
    assert not {line["name"]: line["problem"] for line in manifest["patches"] if line["problem"]}
    diagnosis = compare_runs(tmp_path / "run", tmp_path / "run", replay=False)
    assert diagnosis.coverage.parameters_with_wgrad == diagnosis.coverage.parameters > 0


def test_the_loop_of_mindspeed_llm_is_recorded_whole(tmp_path, mindspeed_llm):
    run = train(tmp_path, mindspeed_llm, under=True, llm=True, extra=["--use-mcore-models"])
    assert all(rank.complete for rank in run.ranks.values())
    assert run.manifest["findings"] == []
    lines = {line["name"]: line for line in run.manifest["patches"]}
    assert not {name: line["problem"] for name, line in lines.items() if line["problem"]}
    # its adaptor sets its own train as Megatron's: one function, seen once
    assert (lines["train"]["calls"], lines["train_step"]["calls"]) == (1, 2)
    assert lines["train_mindspeed_llm"]["note"].startswith("the same function")
    diagnosis = compare_runs(run, run, replay=False)
    assert diagnosis.coverage.parameters_with_wgrad == diagnosis.coverage.parameters > 0


def test_mindspeed_and_megatron_differ_first_where_mindspeed_computes_the_norm_itself(tmp_path, mindspeed):
    """It sets its own multi_tensor_l2norm; up to there both run Megatron's text and have the same bits."""
    train(tmp_path / "megatron", mindspeed, under=False)
    train(tmp_path / "mindspeed", mindspeed, under=True)
    diagnosis = compare_runs(tmp_path / "megatron" / "run", tmp_path / "mindspeed" / "run", replay=False)
    assert diagnosis.first_divergence is not None
    first = diagnosis.first_divergence.comparison.key
    assert (first.step, first.role, first.phase) == (0, Role.GRAD_NORM, Phase.CLIP)
