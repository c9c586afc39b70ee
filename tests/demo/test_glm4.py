"""The demo, as a new user runs it: what it prints and what it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from mindspeed_precision.errors import ConfigError, PrecisionError
from mindspeed_precision.testing.demo import command, glm4_story, probe
from mindspeed_precision.testing.demo.launch import parse_log

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[2]


def test_an_unknown_case_is_refused():
    with pytest.raises(ConfigError, match=r"no such case.*glm5.*glm4"):
        command.run("glm5")


def test_a_directory_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "precious").write_text("kept")
    with pytest.raises(PrecisionError, match="not an empty directory"):
        command.run("glm4", out=tmp_path)
    assert (tmp_path / "precious").read_text() == "kept"


def test_the_probe_counts_elements_that_depend_on_the_layout():
    counts = [probe.differing_elements(dtype, onednn) for dtype, onednn in probe.ARITHMETICS]
    assert all(set(found) == {f"{out}x{inner}" for out, inner in probe.SHAPES} for found in counts)
    assert any(any(found.values()) for found in counts), "no arithmetic of this CPU shows the case"


def test_a_cpu_that_cannot_show_the_case_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(glm4_story, "probe", lambda: None)
    with pytest.raises(PrecisionError, match="cannot show this case"):
        command.run("glm4", out=tmp_path / "new")


@pytest.mark.megatron
@pytest.mark.matrix
def test_the_demo_shows_names_proves_and_repairs(megatron, tmp_path):
    out = tmp_path / "demo"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{megatron('0.17.1')}"}
    command_line = [sys.executable, "-m", "mindspeed_precision", "demo", "glm4", "--out", str(out), "--json"]
    done = subprocess.run(command_line, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "proved by replay" in done.stderr
    verdicts = json.loads(done.stdout)
    assert verdicts["tp1/first-pass"]["status"] == "diverged"
    for layout in ("tp1", "tp2"):
        verdict = json.loads((out / layout / "compare" / "verdict.json").read_text())
        assert verdicts[f"{layout}/compare"] == verdict
        assert verdict["status"] == "diverged"
        first = verdict["first_divergence"]
        assert (first["step"], first["phase"], first["role"], first["origin"]) == (0, "wgrad", "wgrad", True)
        causes = [finding for finding in verdict["findings"] if finding["id"] == "wgrad.operand_layout"]
        assert [finding["proved_by_replay"] for finding in causes] == [True]
        assert [finding["id"] for finding in verdict["findings"]] == ["wgrad.operand_layout"]
        assert all(origin["phase"] == "wgrad" for origin in verdict["origins"])
        coverage = verdict["coverage"]
        assert coverage["parameters"] == coverage["parameters_with_wgrad"] == 27
        assert coverage["unmatched"] == 0
        for name in ("baseline", "candidate"):  # the proof took two short runs
            log = (out / layout / f"{name}-refined.log").read_text()
            assert [row.iteration for row in parse_log(log)] == [1]
            assert log.count("training stops here, after step 0: stop_after=0") == 1
            assert (out / layout / f"{name}-refined" / "rank00000" / "COMPLETE").is_file()
        first_pass = verdicts[f"{layout}/first-pass"]
        assert [finding["proved_by_replay"] for finding in first_pass["findings"]] == [False]
        assert Path(first_pass["refine"]["config"]).is_file()
        repaired = json.loads((out / layout / "compare-with-remedy" / "verdict.json").read_text())
        assert (repaired["status"], repaired["findings"]) == ("identical", [])
