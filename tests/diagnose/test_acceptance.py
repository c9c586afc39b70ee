"""The acceptance criterion of Ascend beside our verdict: what was not recorded is undecided."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mindspeed_precision.flow import compare_runs
from mindspeed_precision.records import Judgement, Level
from mindspeed_precision.report.console import render
from mindspeed_precision.report.verdict_json import verdict_text
from mindspeed_precision.testing.fake_runs import LINEAR, nudged, plant, rounded, scaled, write_fake_run


def told(tmp_path, baseline=None, candidate=None, **options):
    one = write_fake_run(tmp_path / "baseline", **(baseline or {}))
    two = write_fake_run(tmp_path / "candidate", **(candidate or {}))
    diagnosis = compare_runs(one, two, replay=False, **options)
    plain = json.loads(verdict_text(diagnosis))["huawei"]
    line = next(line for line in render(diagnosis, width=400).splitlines() if line.startswith("  huawei"))
    return diagnosis, plain, line


def test_equal_bits_pass(tmp_path):
    diagnosis, plain, line = told(tmp_path)
    assert diagnosis.acceptance.status is Judgement.PASSED
    assert plain["records"] == {"passed": len(diagnosis.comparisons), "failed": 0, "undecided": 0}
    assert plain["loss"] == {"status": "passed", "mean_relative_error": 0.0, "limit": 0.01}
    assert (plain["status"], plain["first_failed"]) == ("passed", None)
    assert " pass; loss error 0, allowed 0.01" in line
    assert "undecided" not in line


def test_rounding_passes_where_elements_were_kept_although_our_verdict_is_diverged(tmp_path):
    nudge = plant(phase="wgrad", role="wgrad", fqn=LINEAR, step=0, value=nudged(3))
    kept = {"level": Level.TENSOR}
    diagnosis, plain, _ = told(tmp_path, kept, {**kept, "plants": [nudge]})
    assert diagnosis.status.value == "diverged"
    assert plain["status"] == "passed"
    assert plain["records"]["failed"] == plain["records"]["undecided"] == 0


def test_without_elements_it_is_undecided_and_says_what_is_lacking(tmp_path):
    nudge = plant(phase="wgrad", role="wgrad", fqn=LINEAR, step=0, value=nudged(3))
    _, plain, line = told(tmp_path, {}, {"plants": [nudge]})
    assert plain["status"] == "undecided"
    assert plain["records"]["undecided"] > 0
    assert "undecided for want of elements" in line


def test_a_wrong_dw_fails_and_is_named(tmp_path):
    wrong = plant(phase="wgrad", role="wgrad", fqn=LINEAR, step=1, microbatch=0, value=scaled(2))
    kept = {"level": Level.TENSOR}
    _, plain, line = told(tmp_path, kept, {**kept, "plants": [wrong]})
    assert plain["status"] == "failed"
    assert plain["first_failed"]["record"].startswith(f"step 1, microbatch 0: {LINEAR} wgrad")
    assert plain["first_failed"]["reason"].startswith("mean_abs_err ")
    assert LINEAR in line


@pytest.mark.parametrize(("factor", "status"), [(1.005, "passed"), (1.05, "failed")])
def test_the_bound_on_the_loss_is_one_per_cent(tmp_path, factor, status):
    off = plant(role="loss", recorded=lambda value: np.asarray(value * np.float32(factor), value.dtype))
    _, plain, _ = told(tmp_path, {}, {"plants": [off]})
    assert plain["loss"]["status"] == status
    assert plain["loss"]["mean_relative_error"] == pytest.approx(factor - 1, rel=1e-3)


def test_nan_on_one_side_fails(tmp_path):
    broken = plant(role="output", fqn="output_layer", step=1, value=lambda value: value * np.float32("nan"))
    kept = {"level": Level.TENSOR}
    _, plain, _ = told(tmp_path, kept, {**kept, "plants": [broken]})
    assert plain["first_failed"]["reason"] == "NaN or infinity on one side only"


def test_it_is_the_verdict_where_it_is_the_policy(tmp_path):
    noise = plant(role="output", fqn="output_layer", step=0, value=rounded(1))
    kept = {"level": Level.TENSOR}
    diagnosis, plain, _ = told(tmp_path, kept, {**kept, "plants": [noise]}, policy="huawei")
    assert diagnosis.status.value == "within_tolerance"
    assert plain["status"] == "passed"


def test_a_setting_that_differs_is_no_rounding(tmp_path):
    other = plant(role="hyperparameter", slot="lr", recorded=lambda value: value * 1.0000001)
    _, plain, _ = told(tmp_path, {"level": Level.TENSOR}, {"level": Level.TENSOR, "plants": [other]})
    assert plain["status"] == "failed"
    assert plain["first_failed"]["reason"] == "bits differ"
