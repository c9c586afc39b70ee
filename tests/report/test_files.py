"""What a comparison writes: the contract for machines, the table, the second pass."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
from dataclasses import replace

import pytest

from mindspeed_precision.config import load_settings
from mindspeed_precision.errors import DumpError
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.records import Level, Phase, RecordKey, Role, Verdict
from mindspeed_precision.report.exit_status import exit_status
from mindspeed_precision.report.files import write_files
from mindspeed_precision.report.verdict_json import verdict
from mindspeed_precision.testing.fake_runs import LINEAR, constant, nudged, plant, write_fake_run


@pytest.fixture(scope="module")
def diagnoses(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    fault = plant(phase="wgrad", role="wgrad", fqn=LINEAR, step=0, microbatch=0, value=nudged())
    one = write_fake_run(directory / "one")
    two = write_fake_run(directory / "two", plants=[fault])
    return {"diverged": compare_runs(one, two, replay=False), "identical": compare_runs(one, one)}


def test_verdict_has_the_keys_of_the_design(diagnoses):
    plain = verdict(diagnoses["diverged"])
    assert plain["schema"] == 1
    assert plain["status"] == "diverged"
    assert set(plain["runs"]) == {"baseline", "candidate"}
    first = plain["first_divergence"]
    expected = {
        "step": 0,
        "microbatch": 0,
        "phase": "wgrad",
        "fqn": LINEAR,
        "role": "wgrad",
        "ranks": [0],
        "origin": True,
    }
    assert {name: first[name] for name in expected} == expected
    assert first["metrics"]["bitwise"] is False
    (finding,) = plain["findings"]
    assert {"id", "severity", "confidence", "title", "evidence", "remedy", "proved_by_replay"} <= set(finding)
    assert set(plain["coverage"]) == {
        "parameters",
        "parameters_with_wgrad",
        "records",
        "matched",
        "unmatched",
    }


def test_verdict_of_equal_runs_has_no_divergence(diagnoses):
    plain = verdict(diagnoses["identical"])
    assert (plain["status"], plain["first_divergence"], plain["findings"]) == ("identical", None, [])


def test_numbers_that_json_lacks_are_texts(tmp_path):
    fault = plant(phase="optimizer", role="exp_avg", fqn=f"{LINEAR}.bias", step=1, value=constant(math.inf))
    zero = plant(phase="wgrad", fqn=f"{LINEAR}.bias", value=constant(0))
    one = write_fake_run(tmp_path / "one", plants=[zero], level=Level.TENSOR)
    diagnosis = compare_runs(one, write_fake_run(tmp_path / "two", plants=[zero, fault], level=Level.TENSOR))
    write_files(diagnosis, tmp_path / "out")
    text = (tmp_path / "out" / "verdict.json").read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_table_has_a_row_per_comparison(diagnoses, tmp_path):
    files = write_files(diagnoses["diverged"], tmp_path)
    if importlib.util.find_spec("pyarrow") is not None:
        assert files["comparisons"].endswith(".parquet")
        return
    with (tmp_path / "comparisons.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(diagnoses["diverged"].comparisons)
    assert sum(row["verdict"] == "diverged" for row in rows) == diagnoses["diverged"].diverged


def test_window_is_a_settings_overlay_for_the_divergent_gemm(diagnoses, tmp_path):
    files = write_files(diagnoses["diverged"], tmp_path)
    settings = load_settings(files["refine"])

    def level(step, fqn, role, phase=Phase.WGRAD):
        return settings.capture.level_of(RecordKey(step=step, microbatch=0, phase=phase, fqn=fqn, role=role))

    assert level(0, LINEAR, Role.GRAD_OUTPUT) is Level.TENSOR
    assert level(0, LINEAR, Role.WGRAD) is Level.TENSOR
    # of all else bits, which show that the second runs are the first ones again
    assert level(1, LINEAR, Role.WGRAD) is Level.FINGERPRINT
    assert level(0, "output_layer", Role.WGRAD) is Level.FINGERPRINT


def test_an_old_window_does_not_survive_agreement(diagnoses, tmp_path):
    write_files(diagnoses["diverged"], tmp_path)
    assert "refine" not in write_files(diagnoses["identical"], tmp_path)
    assert not (tmp_path / "refine.yaml").exists()


def test_a_place_that_cannot_be_written_is_one_error(diagnoses, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DumpError, match="cannot write the report"):
        write_files(diagnoses["identical"], tmp_path / "file")


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (Verdict.IDENTICAL, 0),
        (Verdict.WITHIN_TOLERANCE, 0),
        (Verdict.DIVERGED, 1),
        (Verdict.MISSING, 2),
        (Verdict.INCOMPARABLE, 2),
    ],
)
def test_exit_status(status, expected, diagnoses):
    assert exit_status(replace(diagnoses["identical"], status=status))[0] == expected


def test_a_finding_of_severity_error_makes_the_status_1(diagnoses):
    error = diagnoses["diverged"].findings
    assert exit_status(replace(diagnoses["identical"], findings=error))[0] == 1


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="writes parquet")
@pytest.mark.parametrize("reason", ['=HYPERLINK("https://x")', "+1", "@SUM(1)", "\t=1"])
def test_no_text_of_a_run_is_a_formula_in_a_spreadsheet(diagnoses, tmp_path, reason):
    one, *rest = diagnoses["diverged"].comparisons
    written = replace(diagnoses["diverged"], comparisons=(replace(one, reason=reason), *rest))
    write_files(written, tmp_path)
    with (tmp_path / "comparisons.csv").open(newline="") as file:
        row = next(csv.DictReader(file))
    assert row["reason"] == f"'{reason}"
    assert float(row["step"]) == one.key.step  # numbers stay numbers
