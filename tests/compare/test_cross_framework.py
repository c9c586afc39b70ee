"""Comparing across frameworks: a healthy pair has no finding, and what is wrong is found at the right place.

The healthy candidate rounds every number of its own accord, as another framework's kernels would.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.records import Level, Verdict
from mindspeed_precision.report.console import render
from mindspeed_precision.report.exit_status import exit_status
from mindspeed_precision.testing.fake_runs import (
    LINEAR,
    constant,
    noisy,
    plant,
    rounded,
    scaled,
    write_fake_run,
)

FRAMEWORKS = {
    "torch": {"framework": {"name": "torch", "version": "2.13.0"}},
    "mindspore": {"framework": {"name": "mindspore", "version": "2.7.1"}},
}
BIAS = f"{LINEAR}.bias"
LEVELS = [Level.TENSOR, Level.SKETCH, Level.STATISTICS]

ROLES = (
    ("fprop", "output"),
    ("dgrad", "grad_input"),
    ("wgrad", "?grad"),
    ("loss", "loss"),
    ("clip", "grad_norm"),
)
OTHER_KERNELS = tuple(plant(phase=p, role=r, value=rounded(seed)) for seed, (p, r) in enumerate(ROLES))


KEPT = TemporaryDirectory()


def torch_run(directory, level, **changes):
    return load_run(write_fake_run(directory, level=level, manifest=FRAMEWORKS["torch"], steps=3, **changes))


@cache
def ordinary_baseline(level):
    return torch_run(Path(KEPT.name) / level.value, level)


def pair(directory, *faults, level=Level.TENSOR, both=(), policy=None, kernels=OTHER_KERNELS, **changes):
    """Compare a run of torch with one of MindSpore, whose kernels round otherwise and that has the faults."""
    if both or changes:
        one = torch_run(directory / "one", level, plants=both, **changes)
    else:
        one = ordinary_baseline(level)
    two = write_fake_run(
        directory / "two",
        level=level,
        plants=[*both, *kernels, *faults],
        manifest=FRAMEWORKS["mindspore"],
        steps=3,
        **changes,
    )
    return compare_runs(one, two, policy=policy, replay=False)


def first(diagnosis):
    assert diagnosis.status is Verdict.DIVERGED, render(diagnosis)
    key = diagnosis.first_divergence.key
    return key.step, key.phase.value, key.fqn, key.role.value


@pytest.mark.parametrize("level", LEVELS)
def test_a_healthy_pair(level, tmp_path):
    diagnosis = pair(tmp_path, level=level)
    assert diagnosis.status is Verdict.WITHIN_TOLERANCE, render(diagnosis)
    assert diagnosis.findings == ()
    assert exit_status(diagnosis)[0] == 0
    assert diagnosis.decided[Verdict.WITHIN_TOLERANCE] > 50


def test_equal_bits_are_identical(tmp_path):
    diagnosis = pair(tmp_path, kernels=())
    assert diagnosis.status is Verdict.IDENTICAL
    assert diagnosis.findings == ()


def test_the_default_policy_and_why(tmp_path):
    text = render(pair(tmp_path))
    assert "cross_framework" in text
    assert "the baseline ran on torch and the candidate on mindspore" in " ".join(text.split())
    one, two = (write_fake_run(tmp_path / name) for name in ("a", "b"))
    assert compare_runs(one, two).policy == "exact: bits equal"


def test_an_explicit_policy_wins(tmp_path):
    assert pair(tmp_path, policy="exact").status is Verdict.DIVERGED


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("fault", "where"),
    [
        (plant(phase="fprop", role="output", fqn=LINEAR, step=0, microbatch=0, value=scaled(1.001)),
         (0, "fprop", LINEAR, "output")),
        (plant(phase="dgrad", role="grad_input", fqn=LINEAR, step=0, microbatch=1, value=scaled(0.999)),
         (0, "dgrad", LINEAR, "grad_input")),
        (plant(phase="wgrad", role="wgrad", fqn=LINEAR, step=0, microbatch=0, value=scaled(1.001)),
         (0, "wgrad", LINEAR, "wgrad")),
        (plant(phase="accumulate", slot="after", fqn=f"{LINEAR}.weight", step=0, microbatch=1,
               value=scaled(0.5)),
         (0, "accumulate", f"{LINEAR}.weight", "main_grad")),
        (plant(phase="optimizer", role="exp_avg", fqn=BIAS, step=0, value=scaled(1.01)),
         (0, "optimizer", BIAS, "exp_avg")),
        (plant(phase="wgrad", role="wgrad", fqn=LINEAR, step=1, microbatch=0, value=scaled(1.5)),
         (1, "wgrad", LINEAR, "wgrad")),
    ],
)  # fmt: skip
def test_a_fault_is_found_where_it_is(fault, where, level, tmp_path):
    assert first(pair(tmp_path, fault, level=level)) == where


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        (plant(phase="batch", slot="tokens", step=0, microbatch=0, value=lambda x: x[::-1].copy()),
         (0, "batch", "batch", "batch")),
        (plant(phase="init", fqn=BIAS, value=rounded(9)), (-1, "init", BIAS, "param")),
        (plant(role="hyperparameter", slot="eps", step=0, fqn=BIAS, value=scaled(1.0001)),
         (0, "optimizer", BIAS, "hyperparameter")),
    ],
)  # fmt: skip
def test_copies_and_settings_are_not_excused(fault, where, tmp_path):
    assert first(pair(tmp_path, fault)) == where


def test_a_number_kept_in_float32_is_the_same_setting(tmp_path):
    def single(value):
        return np.asarray(float(np.float32(value)))

    diagnosis = pair(tmp_path, plant(role="hyperparameter", value=single))
    assert diagnosis.status is Verdict.WITHIN_TOLERANCE, render(diagnosis)
    assert diagnosis.findings == ()


@pytest.mark.parametrize("level", LEVELS)
def test_nan_on_one_side_is_no_rounding(level, tmp_path):
    def poisoned(value):
        return np.where(np.arange(value.size).reshape(value.shape) == 0, np.float32(np.nan), value)

    fault = plant(phase="dgrad", role="grad_input", fqn=LINEAR, step=0, microbatch=0, value=poisoned)
    diagnosis = pair(tmp_path, fault, level=level)
    assert first(diagnosis) == (0, "dgrad", LINEAR, "grad_input")


def test_a_few_wrong_rows_do_not_drown(tmp_path):
    def one_row(value):
        changed = value.copy()
        changed[3] *= np.float32(1.0005)
        return changed

    fault = plant(phase="wgrad", role="wgrad", fqn=LINEAR, step=0, microbatch=0, value=one_row)
    assert first(pair(tmp_path, fault)) == (0, "wgrad", LINEAR, "wgrad")


# Gradients that are zero in mathematics: ``noisy`` rows are what rounding leaves, another on each side.

THIRD = slice(2, 5)
ALL = slice(None)


def noise(seed, rows):
    return plant(phase="wgrad", role="bgrad", fqn=BIAS, value=noisy(seed, rows))


def noise_pair(directory, rows, *faults, level=Level.TENSOR):
    """Compare two runs of one step in which some rows of a bias gradient are noise."""
    one = write_fake_run(
        directory / "one", level=level, steps=1, plants=[noise(1, rows)], manifest=FRAMEWORKS["torch"]
    )
    two = write_fake_run(
        directory / "two",
        level=level,
        steps=1,
        plants=[*OTHER_KERNELS, noise(2, rows), *faults],
        manifest=FRAMEWORKS["mindspore"],
    )
    return compare_runs(one, two, replay=False)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", [THIRD, ALL])
def test_noise_agrees_in_no_digit_and_is_no_finding(rows, level, tmp_path):
    diagnosis = noise_pair(tmp_path, rows, level=level)
    assert diagnosis.status is Verdict.WITHIN_TOLERANCE, render(diagnosis)
    assert diagnosis.findings == ()
    said = any("cancels to noise" in note and BIAS in note for note in diagnosis.notes)
    assert said == (level is Level.TENSOR or rows == ALL)  # statistics of the whole show no block
    moved = [c for c in diagnosis.comparisons if c.key.fqn == BIAS and c.key.role.value == "param"]
    if level is Level.TENSOR:
        assert moved[-1].metrics["noise_elements"] == len(range(8)[rows])
        assert moved[-1].metrics["noise_update_ratio"] > 0.1  # a relative bound would have called it diverged
        assert "cancels to noise" in moved[-1].reason


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", [THIRD, ALL])
def test_noise_that_becomes_large_on_one_side(rows, level, tmp_path):
    def large(value):
        changed = value.copy()
        changed[rows] = np.float32(0.02)
        return changed

    fault = plant(phase="wgrad", role="bgrad", fqn=BIAS, microbatch=1, value=large)
    assert first(noise_pair(tmp_path, rows, fault, level=level)) == (0, "wgrad", BIAS, "bgrad")


@pytest.mark.parametrize("level", LEVELS)
def test_an_error_beside_noise(level, tmp_path):
    def other_rows(value):
        changed = value.copy()
        changed[5:] *= np.float32(1.01)
        return changed

    fault = plant(phase="wgrad", role="bgrad", fqn=BIAS, microbatch=1, value=other_rows)
    assert first(noise_pair(tmp_path, THIRD, fault, level=level)) == (0, "wgrad", BIAS, "bgrad")


# Parameters after Adam: gradients decide first.


def update(directory, value, *, level=Level.TENSOR, rows=THIRD):
    return noise_pair(
        directory, rows, plant(phase="optimizer", role="param", fqn=BIAS, value=value), level=level
    )


def test_a_parameter_that_did_not_move(tmp_path):
    started = compare_runs(*(write_fake_run(tmp_path / n, steps=1) for n in "ab"))
    assert started.status is Verdict.IDENTICAL

    kept = {}

    def keep(value):
        kept["initial"] = value.copy()
        return value

    faults = (
        plant(phase="init", fqn=BIAS, value=keep),
        plant(phase="optimizer", role="param", fqn=BIAS, value=lambda _: kept["initial"]),
    )
    diagnosis = noise_pair(tmp_path / "c", THIRD, *faults)
    assert first(diagnosis) == (0, "optimizer", BIAS, "param")
    assert "update_share" in diagnosis.first_divergence.comparison.reason


def test_noise_moves_no_further_than_the_optimizer_can(tmp_path):
    def thrown(value):
        changed = value.copy()
        changed[3] += np.float32(0.05)  # five times the learning rate
        return changed

    diagnosis = update(tmp_path, thrown)
    assert first(diagnosis) == (0, "optimizer", BIAS, "param")
    assert "noise_update_ratio" in diagnosis.first_divergence.comparison.reason


def test_a_norm_shows_what_no_update_can_do(tmp_path):
    assert first(update(tmp_path, scaled(1.1), level=Level.STATISTICS)) == (0, "optimizer", BIAS, "param")


def test_a_wrong_gradient_explains_the_parameter(tmp_path):
    fault = plant(phase="wgrad", role="wgrad", fqn=LINEAR, step=0, microbatch=0, value=scaled(-3))
    diagnosis = pair(tmp_path, fault)
    assert first(diagnosis) == (0, "wgrad", LINEAR, "wgrad")
    assert len(diagnosis.origins) == 1
    weight = [
        c for c in diagnosis.comparisons if c.key.fqn == f"{LINEAR}.weight" and c.key.role.value == "param"
    ]
    assert Verdict.DIVERGED in {comparison.verdict for comparison in weight}


def test_bounds_grow_with_the_updates(tmp_path):
    def excused(step):
        fault = plant(phase="wgrad", role="wgrad", fqn=LINEAR, step=step, microbatch=0, value=rounded(5, 2e4))
        return pair(tmp_path / str(step), fault).status

    assert excused(0) is Verdict.DIVERGED  # 1e-3, before any update
    assert excused(2) is Verdict.WITHIN_TOLERANCE  # after two updates of 0.01: noise may be 4e-2


@pytest.mark.matrix
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000), roundings=st.floats(0.5, 16))
def test_kernels_that_round_are_never_a_finding(seed, roundings, tmp_path_factory):
    kernels = [plant(phase=p, role=r, value=rounded(seed + n, roundings)) for n, (p, r) in enumerate(ROLES)]
    diagnosis = pair(tmp_path_factory.mktemp("run"), kernels=kernels)
    assert diagnosis.status is Verdict.WITHIN_TOLERANCE, render(diagnosis)
    assert diagnosis.findings == ()


# What the runs say of themselves.


def with_manifest(directory, one, two):
    runs = [
        write_fake_run(directory / name, manifest={**FRAMEWORKS[name], **manifest}, plants=plants)
        for name, manifest, plants in (("torch", one, ()), ("mindspore", two, OTHER_KERNELS))
    ]
    return compare_runs(*runs, replay=False)


def test_switches_of_one_framework_are_no_finding(tmp_path):
    diagnosis = with_manifest(
        tmp_path,
        {
            "versions": {"python": "3.11", "torch": "2.13.0", "numpy": "2.4"},
            "environment": {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
            "numerics": {"num_threads": 1, "mkldnn": True, "cpu_capability": "AVX2", "device": "cpu"},
        },
        {
            "versions": {"python": "3.11", "mindspore": "2.7.1", "numpy": "1.26"},
            "environment": {"OMP_NUM_THREADS": "2", "MS_ROLE": "MS_WORKER"},
            "numerics": {"num_threads": 2, "launch_blocking": True, "device": "CPU"},
        },
    )
    assert diagnosis.findings == ()
    assert any("torch 2.13.0 in the baseline, mindspore 2.7.1 in the candidate" in n for n in diagnosis.notes)


def test_a_switch_that_both_read_is_still_said(tmp_path):
    diagnosis = with_manifest(
        tmp_path,
        {"environment": {"HCCL_DETERMINISTIC": "true"}, "numerics": {"deterministic_algorithms": True}},
        {"environment": {"HCCL_DETERMINISTIC": "false"}, "numerics": {"deterministic_algorithms": False}},
    )
    assert [finding.id for finding in diagnosis.findings] == ["env.differs"]
    assert len(diagnosis.findings[0].evidence) == 2


def test_random_states_of_other_generators_are_not_compared(tmp_path):
    fault = plant(role="rng", value=constant(7))
    diagnosis = pair(tmp_path, fault)
    assert diagnosis.findings == ()
    assert any("random states" in note for note in diagnosis.notes)
