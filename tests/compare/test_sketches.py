"""Two runs with sketches and no elements: what a permutation does, and what healthy rounding does not.

The candidate rounds every number of its own accord, as another framework's kernels would, so that no
permutation shows in an unordered fingerprint.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import numpy as np
import pytest

from mindspeed_precision.compare.policy import load_policy
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.records import Level, Verdict
from mindspeed_precision.report.console import render
from mindspeed_precision.report.verdict_json import verdict_text
from mindspeed_precision.testing.fake_runs import EMBEDDING, LINEAR, plant, rounded, scaled, write_fake_run

WEIGHT = f"{LINEAR}.weight"
NOTE = "judged by norm, minimum and maximum alone, which a permutation does not change"
KERNELS = tuple(
    plant(phase=phase, role=role, recorded=rounded(seed), value=rounded(seed))
    for seed, (phase, role) in enumerate([("fprop", "output"), ("dgrad", "grad_input"), ("wgrad", "wgrad")])
)
POLICIES = ("cross_framework", "tolerance")


def misread(value):
    """Return what a kernel gives that reads [out, in] as it lies in memory, transposed."""
    return np.ascontiguousarray(value.T).reshape(value.shape)


MISREAD = plant(phase="accumulate", slot="after", fqn=WEIGHT, step=0, microbatch=1, recorded=misread)


def pair(directory, *faults, level, policy="cross_framework", kernels=KERNELS):
    one = write_fake_run(directory / "one", level=level, steps=1)
    two = write_fake_run(directory / "two", level=level, steps=1, plants=[*kernels, *faults])
    return compare_runs(one, two, policy=policy, replay=False)


def notes(diagnosis):
    return [note for note in diagnosis.notes if NOTE in note]


@pytest.mark.parametrize("policy", POLICIES)
def test_statistics_let_a_permutation_pass_and_say_so(policy, tmp_path):
    diagnosis = pair(tmp_path, MISREAD, level=Level.STATISTICS, policy=policy)
    assert diagnosis.status is Verdict.WITHIN_TOLERANCE, render(diagnosis)
    (note,) = notes(diagnosis)
    assert "capture.level=sketch or tensor" in note
    assert int(note.split()[0]) == sum(
        c.verdict is Verdict.WITHIN_TOLERANCE and "mismatched" not in c.metrics for c in diagnosis.comparisons
    )
    assert NOTE in " ".join(render(diagnosis).split())


@pytest.mark.parametrize("policy", POLICIES)
def test_sketches_show_a_permutation(policy, tmp_path):
    diagnosis = pair(tmp_path, MISREAD, level=Level.SKETCH, policy=policy)
    assert diagnosis.status is Verdict.DIVERGED, render(diagnosis)
    first = diagnosis.first_divergence
    assert (first.key.phase.value, first.key.fqn, first.key.slot) == ("accumulate", WEIGHT, "after")
    assert not notes(diagnosis)
    assert 1 < first.comparison.metrics["sketch_distance"] < 2
    text = " ".join(render(diagnosis).split())
    assert f"relative error about {first.comparison.metrics['sketch_distance']:.2g} (estimated" in text
    assert "rel_frobenius at least" in first.comparison.reason
    assert "(estimated), allowed is rel_frobenius <=" in first.comparison.reason
    assert "sketch_distance" in verdict_text(diagnosis)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("level", [Level.SKETCH, Level.TENSOR])
def test_healthy_rounding_is_within_tolerance_and_needs_no_note(policy, level, tmp_path):
    diagnosis = pair(tmp_path, level=level, policy=policy)
    assert diagnosis.status is Verdict.WITHIN_TOLERANCE, render(diagnosis)
    assert diagnosis.findings == ()
    assert not notes(diagnosis)
    reasons = {c.reason for c in diagnosis.comparisons if c.verdict is Verdict.WITHIN_TOLERANCE}
    assert any("(estimated)" in reason for reason in reasons) == (level is Level.SKETCH)


def test_equal_runs_need_no_note(tmp_path):
    diagnosis = pair(tmp_path, level=Level.STATISTICS, kernels=())
    assert diagnosis.status is Verdict.IDENTICAL
    assert not notes(diagnosis)


@pytest.mark.parametrize("level", [Level.STATISTICS, Level.SKETCH])
def test_zeros_of_different_signs_have_no_order(level, tmp_path):
    def zeros(sign):
        return plant(
            phase="accumulate", slot="after", fqn=WEIGHT, recorded=lambda x: np.full_like(x, sign * 0.0)
        )

    one = write_fake_run(tmp_path / "one", level=level, steps=1, plants=[zeros(1)])
    two = write_fake_run(tmp_path / "two", level=level, steps=1, plants=[zeros(-1)])
    diagnosis = compare_runs(one, two, policy="tolerance", replay=False)
    assert diagnosis.status is Verdict.WITHIN_TOLERANCE
    assert not notes(diagnosis)


@pytest.mark.parametrize(
    ("level", "verdict"), [(Level.STATISTICS, Verdict.WITHIN_TOLERANCE), (Level.SKETCH, Verdict.DIVERGED)]
)
def test_a_permuted_parameter_after_an_update(level, verdict, tmp_path):
    fault = plant(phase="optimizer", role="param", fqn=WEIGHT, step=0, recorded=misread)
    diagnosis = pair(tmp_path, fault, level=level)
    assert diagnosis.status is verdict, render(diagnosis)
    assert bool(notes(diagnosis)) == (level is Level.STATISTICS)
    if verdict is Verdict.DIVERGED:
        assert "update_share at least" in diagnosis.first_divergence.comparison.reason


# Parameters after an update, whose elements were not kept.

BIAS = f"{LINEAR}.bias"
EVERY_MATRIX = "*.weight"
EVERY_SECOND = np.float32([-1, 1] * 4)


def wrong_sign(fqn, share=1):
    """Return a fault that moves parameters in the other direction, by ``share`` of what they should."""
    start = {}

    def keep(name):
        def value(array):
            start[name] = array.copy()
            return array

        return value

    def away(name):
        return lambda array: start[name] - share * (array - start[name])

    names = [n for n in (f"{EMBEDDING}.weight", WEIGHT, BIAS) if fnmatchcase(n, fqn)]
    kept = [plant(phase="init", fqn=name, value=keep(name)) for name in names]
    moved = [plant(phase="optimizer", role="param", fqn=name, value=away(name)) for name in names]
    return [*kept, *moved]


def blind(diagnosis):
    return [note for note in diagnosis.notes if "by the norm alone" in note]


@pytest.mark.parametrize("level", [Level.SKETCH, Level.TENSOR])
def test_an_update_of_the_wrong_sign(level, tmp_path):
    diagnosis = pair(tmp_path, *wrong_sign(EVERY_MATRIX), level=level)
    assert [origin.key.fqn for origin in diagnosis.origins] == [f"{EMBEDDING}.weight", WEIGHT]
    assert {origin.key.role.value for origin in diagnosis.origins} == {"param"}
    assert [finding.id for finding in diagnosis.findings] == ["optimizer.update"]
    assert not blind(diagnosis)
    if level is Level.SKETCH:
        reason = diagnosis.first_divergence.comparison.reason
        assert "update_share at least" in reason
        assert reason.endswith("(estimated), allowed is update_share <= 0.2")


def test_statistics_let_it_pass_and_say_so(tmp_path):
    diagnosis = pair(tmp_path, *wrong_sign(EVERY_MATRIX), level=Level.STATISTICS)
    assert diagnosis.status is Verdict.WITHIN_TOLERANCE, render(diagnosis)
    (note,) = blind(diagnosis)
    assert f"{EMBEDDING}.weight" in note
    assert note.endswith("capture.level=sketch or tensor")


@pytest.mark.parametrize(
    ("level", "policy"), [(Level.SKETCH, "cross_framework"), (Level.STATISTICS, "exact")]
)
def test_where_no_norm_decides_there_is_no_such_note(level, policy, tmp_path):
    diagnosis = pair(tmp_path, level=level, policy=policy)
    assert not blind(diagnosis)


def test_healthy_updates_are_far_below_the_bound_on_a_sketch(tmp_path):
    diagnosis = pair(tmp_path, level=Level.SKETCH)
    least = [
        c.metrics["sketch_update_least"] for c in diagnosis.comparisons if "sketch_update_least" in c.metrics
    ]
    assert len(least) >= 3
    assert max(least) < 0.2 / 50


def test_a_bias_may_be_noise_in_part_which_sketches_do_not_show(tmp_path):
    diagnosis = pair(tmp_path, *wrong_sign(BIAS, share=EVERY_SECOND), level=Level.SKETCH)
    (bias,) = (c for c in diagnosis.comparisons if c.key.fqn == BIAS and "norm_update_share" in c.metrics)
    assert "sketch_update_least" not in bias.metrics
    assert "norm_update_share" in bias.reason
    assert [note.endswith("capture.level=tensor") for note in blind(diagnosis)] == [True]


@pytest.mark.parametrize("size", [1.5, 1.0003])
def test_a_factor_is_measured_on_sketches(size, tmp_path):
    fault = plant(phase="wgrad", role="wgrad", fqn=LINEAR, step=0, microbatch=0, value=scaled(size))
    diagnosis = pair(tmp_path, fault, level=Level.SKETCH, kernels=(), policy="exact")
    finding = next(finding for finding in diagnosis.findings if finding.id == "wgrad.scaled")
    assert f"{size:g}" in finding.title
    assert any("measured on the sketches" in line for line in finding.evidence)
    assert finding.confidence > 0.9


def test_one_side_without_sketches_is_judged_by_norms_and_says_so(tmp_path):
    one = write_fake_run(tmp_path / "one", level=Level.STATISTICS, steps=1)
    two = write_fake_run(tmp_path / "two", level=Level.SKETCH, steps=1, plants=[*KERNELS, MISREAD])
    diagnosis = compare_runs(one, two, policy=load_policy("cross_framework"), replay=False)
    assert diagnosis.status is Verdict.WITHIN_TOLERANCE
    assert notes(diagnosis)


def test_what_the_estimate_leaves_open_the_norm_decides(tmp_path):
    """A bound between the ends of an estimate: neither proved nor excluded."""
    policy = tmp_path / "policy.yaml"
    metrics = pair(tmp_path / "runs", MISREAD, level=Level.SKETCH).first_divergence.comparison.metrics
    for bound, verdict in (
        (metrics["sketch_low"] * 0.9, Verdict.DIVERGED),
        ((metrics["sketch_low"] + metrics["sketch_high"]) / 2, Verdict.WITHIN_TOLERANCE),
    ):
        policy.write_text(
            "schema: 1\ntitle: one bound\nrules:\n  - dtype: '*'\n"
            f"    limits: [{{metric: rel_frobenius, maximum: {bound}}}]\n"
            "    without_elements: [{metric: norm_change, maximum: 1.0e-3}]\n"
        )
        one, two = tmp_path / "runs" / "one", tmp_path / "runs" / "two"
        assert compare_runs(one, two, policy=str(policy), replay=False).status is verdict
