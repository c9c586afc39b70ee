"""Policies: what each shipped one lets pass, what it refuses, and what it cannot judge."""

from __future__ import annotations

import pytest

from mindspeed_precision.compare import load_policy, policy_names
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.records import Level, Verdict
from mindspeed_precision.report.console import render
from mindspeed_precision.testing.fake_runs import LINEAR, constant, nudged, plant, scaled, write_fake_run

SMALL = plant(phase="wgrad", role="wgrad", fqn=LINEAR, step=1, value=nudged())
LARGE = plant(phase="wgrad", role="wgrad", fqn=LINEAR, step=1, value=scaled(1.5))


def diagnose(directory, policy, *plants, level=Level.TENSOR):
    one = write_fake_run(directory / "one", level=level)
    return compare_runs(one, write_fake_run(directory / "two", level=level, plants=plants), policy=policy)


def test_shipped_policies_load():
    assert policy_names() == ["cross_framework", "cross_layout", "exact", "huawei", "msprobe", "tolerance"]
    assert load_policy("exact").exact
    assert not load_policy("tolerance").exact


@pytest.mark.parametrize(
    ("policy", "fault", "status"),
    [
        ("exact", SMALL, Verdict.DIVERGED),
        ("tolerance", SMALL, Verdict.WITHIN_TOLERANCE),
        ("huawei", SMALL, Verdict.WITHIN_TOLERANCE),
        ("tolerance", LARGE, Verdict.DIVERGED),
        ("huawei", LARGE, Verdict.DIVERGED),
    ],
)
def test_what_a_policy_decides(policy, fault, status, tmp_path):
    diagnosis = diagnose(tmp_path, policy, fault)
    assert diagnosis.status is status
    assert diagnosis.policy.startswith(f"{policy}: ")
    assert policy in render(diagnosis)


def test_tolerance_judges_norms_where_no_elements_were_kept(tmp_path):
    assert (
        diagnose(tmp_path / "a", "tolerance", SMALL, level=Level.STATISTICS).status
        is Verdict.WITHIN_TOLERANCE
    )
    assert diagnose(tmp_path / "b", "tolerance", LARGE, level=Level.STATISTICS).status is Verdict.DIVERGED


def test_what_a_policy_cannot_judge_is_not_aligned(tmp_path):
    diagnosis = diagnose(tmp_path, "huawei", SMALL, level=Level.STATISTICS)
    assert diagnosis.status is Verdict.MISSING
    assert "coverage.not_judged" in {f.id for f in diagnosis.findings}
    assert any("policy huawei" in note for note in diagnosis.notes)


def test_no_tolerance_excuses_a_setting(tmp_path):
    fault = plant(role="hyperparameter", slot="eps", step=1, value=constant(1.00001e-8))
    assert diagnose(tmp_path, "tolerance", fault).first_divergence.key.slot == "eps"


def test_loss_over_the_steps_has_its_own_bound(tmp_path):
    # each reported loss is a float32 scalar: no per-record bound is broken, the bound on the run is
    policy = tmp_path / "loose.yaml"
    policy.write_text(
        "schema: 1\ntitle: loose\nrules:\n  - dtype: '*'\n    limits: [{metric: norm_change, maximum: 9.0}]\n"
        "run: {max_mean_relative_loss_error: 0.01}\n"
    )
    diagnosis = diagnose(tmp_path, str(policy), plant(phase="loss", slot="lm loss", value=scaled(1.5)))
    assert diagnosis.status is Verdict.DIVERGED
    assert diagnosis.origins == ()
    assert "the loss over the steps is not" in render(diagnosis)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema: 2\n", "another version of the policy format"),
        ("titel: x\n", "titel"),
        ("rules: [{dtype: '*', limits: [{metric: 1, maximum: many}]}]\n", "many"),
        ("{", "not readable as YAML"),
        ("- 1\n", "policy"),
    ],
)
def test_a_bad_policy_file_is_one_clear_error(text, message, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_policy(str(path))


def test_unknown_policy_lists_the_known_ones():
    with pytest.raises(ConfigError, match="cross_framework, cross_layout, exact, huawei, msprobe, tolerance"):
        load_policy("strict")


def test_an_empty_file_is_no_policy(tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(ConfigError, match="without a title"):
        load_policy(str(tmp_path / "empty.yaml"))
