"""The MindSpore cases, as a new user runs them; and what a laptop without any framework says of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.errors import PrecisionError
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.records import Phase, Role, Verdict
from mindspeed_precision.testing.demo import frameworks, mindspore_story
from mindspeed_precision.testing.demo.arguments import demo_arguments
from mindspeed_precision.testing.demo.launch import SCRIPT, parse_log, run_on_mindspore, run_twin

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[2]
TWIN = ROOT / "mindspeed_precision" / "testing" / "twin"
EVERY_ROLE = {
    *(Role.INPUT, Role.OUTPUT, Role.GRAD_OUTPUT, Role.GRAD_INPUT, Role.WGRAD, Role.BGRAD, Role.MAIN_GRAD),
    *(Role.REDUCED_GRAD, Role.PARAM, Role.EXP_AVG, Role.EXP_AVG_SQ, Role.LOSS, Role.GRAD_NORM, Role.BATCH),
    *(Role.HYPERPARAMETER, Role.RNG),
}


def test_a_missing_environment_is_one_clear_error(monkeypatch, tmp_path):
    monkeypatch.setenv(frameworks.PYTHON, str(tmp_path / "bin" / "python"))
    with pytest.raises(PrecisionError, match=r"no environment with MindSpore.*make demo-mindspore"):
        frameworks.interpreter(frameworks.PYTHON)


def test_a_missing_megatron_is_one_clear_error(monkeypatch, tmp_path):
    monkeypatch.setenv("MSP_MCORE", str(tmp_path))
    with pytest.raises(PrecisionError, match=r"no megatron-core 0\.12\.1.*make demo-mindspore"):
        frameworks.megatron()


def test_a_machine_that_mindspore_does_not_fit_says_why(monkeypatch, tmp_path):
    (tmp_path / ".unavailable").write_text("MindSpore 2.7.1 has no wheel for this machine\n")
    monkeypatch.setenv(frameworks.PYTHON, str(tmp_path / "bin" / "python"))
    with pytest.raises(PrecisionError, match="has no wheel for this machine"):
        frameworks.interpreter(frameworks.PYTHON)


def test_a_release_without_the_defect_is_told_and_is_no_failure(monkeypatch, tmp_path, capsys):
    mended = {"present": False, "follows_law": False, "line": "this MindSpore does not have the defect"}
    monkeypatch.setattr(mindspore_story, "probes", lambda _: {"accumulation": mended})
    assert mindspore_story.tell_accumulate(tmp_path)
    assert "does not have the defect" in capsys.readouterr().out


@pytest.fixture(scope="module")
def demo(megatron, mindspore_python, mindspore_native_python, tmp_path_factory):
    """Run every MindSpore case once; return its directory and its verdicts."""
    out = tmp_path_factory.mktemp("demo") / "mindspore"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{megatron('0.12.1')}",
        "PYTHONHASHSEED": "1234",
        frameworks.PYTHON: str(mindspore_python),
        frameworks.NATIVE_PYTHON: str(mindspore_native_python),
    }
    command = [sys.executable, "-m", "mindspeed_precision", "demo", "mindspore", "--out", str(out), "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out, json.loads(done.stdout)


@pytest.mark.megatron
@pytest.mark.matrix
class TestDemo:
    """One run of the demo, looked at from every side."""

    @pytest.mark.parametrize("layout", ["healthy-tp1", "healthy-tp2"])
    def test_a_healthy_pair_agrees_and_is_aligned(self, demo, layout):
        out, verdicts = demo
        verdict = verdicts[f"{layout}/compare"]
        assert (verdict["status"], verdict["findings"]) == ("within_tolerance", [])
        coverage = verdict["coverage"]
        assert coverage["unmatched"] == 0
        assert coverage["parameters"] == coverage["parameters_with_wgrad"] == 27
        for run in (load_run(out / layout / name) for name in ("torch", "mindspore")):
            assert {record.key.role for record in run.ranks[0].records} >= EVERY_ROLE
            accumulated = [r for r in run.ranks[0].records if r.key.phase is Phase.ACCUMULATE]
            assert {r.key.slot for r in accumulated} == {"before", "after"}
            assert all(record.layout is not None for record in accumulated)

    def test_mindspore_twice_is_identical(self, demo):
        assert demo[1]["healthy-tp1/compare-again"]["status"] == "identical"

    @pytest.mark.parametrize(
        ("case", "phase", "role", "finding"),
        [
            ("accumulate", "accumulate", "main_grad", "layout.noncontiguous_accumulate"),
            ("split", "dgrad", "grad_output", "layout.noncontiguous_grad"),
        ],
    )
    def test_a_defect_is_named_proved_and_cured(self, demo, case, phase, role, finding):
        _, verdicts = demo
        verdict = verdicts[f"{case}/compare"]
        first = verdict["first_divergence"]
        assert verdict["status"] == "diverged"
        assert (first["step"], first["phase"], first["role"]) == (0, phase, role)
        assert [found["id"] for found in verdict["findings"]] == [finding]
        assert verdict["findings"][0]["proved_by_replay"]
        cured = verdicts[f"{case}/compare-with-remedy"]
        assert (cured["status"], cured["findings"]) == ("within_tolerance", [])

    def test_the_split_starts_at_linear_qkv_and_chunk_is_healthy(self, demo):
        _, verdicts = demo
        first = verdicts["split/compare"]["first_divergence"]
        assert first["fqn"] == "decoder.layers.1.self_attention.linear_qkv"
        healthy = verdicts["split/compare-chunk"]
        assert (healthy["status"], healthy["findings"]) == ("within_tolerance", [])

    def test_an_optimizer_that_moves_nothing_is_named(self, demo):
        _, verdicts = demo
        found = [finding["id"] for finding in verdicts["optimizer/compare"]["findings"]]
        assert found[0] == "optimizer.parameters_unmoved"
        assert verdicts["optimizer/compare-again"]["status"] == "identical"

    def test_recording_changes_no_printed_digit(self, demo, mindspore_python, tmp_path):
        arguments = demo_arguments(
            dropout=0.0, iterations=frameworks.STEPS, micro_batch_size=2, global_batch_size=4
        )
        plain = run_on_mindspore(SCRIPT, arguments, python=mindspore_python, log=tmp_path / "plain.log")
        recorded = (demo[0] / "healthy-tp1" / "mindspore.log").read_text()
        assert plain.rows == parse_log(recorded)

    def test_a_bias_that_is_added_inside_is_a_matter_of_the_mapping(
        self, demo, mindspore_native_python, tmp_path
    ):
        out = tmp_path / "bias-inside"
        arguments = [
            "--steps",
            "3",
            "--microbatches",
            "2",
            "--bias-inside",
            "--precision-debug-out",
            str(out),
        ]
        arguments += ["--precision-debug-set", "capture.level=tensor"]
        run_twin(arguments, python=mindspore_native_python, log=tmp_path / "log")
        torch = demo[0] / "split" / "torch"
        names = TWIN / "megatron.mapping.yaml"
        biases = [TWIN / "bias_inside.mapping.yaml", TWIN / "bias_inside_gradients.mapping.yaml"]
        assert compare_runs(torch, out, mapping=[names]).status is Verdict.DIVERGED
        told = compare_runs(torch, out, mapping=[names, *biases])
        assert (told.status, told.findings, told.unmatched) == (Verdict.WITHIN_TOLERANCE, (), ())

    def test_the_runs_are_compared_where_neither_framework_is(self, demo):
        """The analysis runs in a process in which any import of a framework is an error."""
        runs = [str(demo[0] / "accumulate" / name) for name in ("torch", "mindspore")]
        code = (
            "import sys\n"
            "for name in ('torch', 'mindspore', 'mindtorch'): sys.modules[name] = None\n"
            "from mindspeed_precision.cli import main\n"
            f"sys.exit(main(['compare', *{runs!r}, '--json']))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert done.returncode == 1, done.stderr
        verdict = json.loads(done.stdout)
        assert verdict["findings"][0]["id"] == "layout.noncontiguous_accumulate"
        assert verdict["findings"][0]["proved_by_replay"]
