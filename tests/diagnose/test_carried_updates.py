"""A parameter that is tolerated after a wrong update explains what it does later; no other parameter does.

The policies tolerate much in a parameter and little elsewhere, as norms do in real runs: an update of the
right size in a wrong direction hardly changes the norm of a matrix, and changes what the matrix computes.
"""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_precision.flow import compare_runs
from mindspeed_precision.records import Level, Verdict
from mindspeed_precision.report.console import render
from mindspeed_precision.testing.fake_runs import LINEAR, plant, rounded, scaled, write_fake_run

WEIGHT, BIAS = f"{LINEAR}.weight", f"{LINEAR}.bias"
BEFORE = "decoder.layers.0.mlp.linear_fc1"
LEVELS = [Level.STATISTICS, Level.SKETCH]
KERNELS = tuple(
    plant(phase=phase, role=role, value=rounded(seed))
    for seed, (phase, role) in enumerate([("fprop", "output"), ("dgrad", "grad_input"), ("wgrad", "wgrad")])
)
POLICY = """
schema: 1
title: norms, wide ones for parameters
rules:
  - {phase: init, role: "*"}
  - {phase: batch, role: "*"}
  - dtype: "*float*"
    role: "*param"
    limits: [{metric: PARAMETER, maximum: 0.5}]
    cancels_below: 1.0e-9
  - dtype: "*float*"
    limits: [{metric: norm_change, maximum: 1.0e-5, growth: 1.0e-5}]
"""


def wrong_rows(value):
    """Return what a kernel gives that reads some rows twice."""
    changed = value.copy()
    changed[4:] = changed[:4]
    return changed


def pair(directory, *faults, level, parameter="norm_change", kernels=KERNELS, policy=None):
    policy = policy or write_policy(directory, parameter)
    one = write_fake_run(directory / "one", level=level, steps=3)
    two = write_fake_run(directory / "two", level=level, steps=3, plants=[*kernels, *faults])
    return compare_runs(one, two, policy=policy, replay=False)


def write_policy(directory, parameter):
    file = directory / "wide.yaml"
    file.write_text(POLICY.replace("PARAMETER", parameter), encoding="utf-8")
    return str(file)


def verdicts(diagnosis, *, step, phase, role, fqn):
    wanted = (step, phase, role, fqn)
    return {
        c.verdict
        for c in diagnosis.comparisons
        if (c.key.step, c.key.phase.value, c.key.role.value, c.key.fqn) == wanted
    }


def origins(diagnosis):
    return [(o.key.step, o.key.phase.value, o.key.fqn) for o in diagnosis.origins]


DW_ROWS = plant(phase="wgrad", role="wgrad", fqn=WEIGHT, step=0, value=wrong_rows)
DW_SCALED = plant(phase="wgrad", role="wgrad", fqn=WEIGHT, step=0, microbatch=0, value=scaled(-1.5))
LABELS = plant(phase="batch", slot="labels", value=lambda labels: np.roll(labels, 1))
LR = plant(role="hyperparameter", slot="lr", fqn=WEIGHT, step=0, value=scaled(2.0))
ACCUMULATED = plant(phase="accumulate", slot="after", fqn=WEIGHT, step=0, microbatch=1, value=wrong_rows)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "fault",
    [DW_SCALED, DW_ROWS, ACCUMULATED, LABELS, LR],
    ids=["dW scaled", "rows of dW", "main_grad", "labels", "lr"],
)
def test_what_a_wrong_update_does_later_is_no_second_origin(fault, level, tmp_path):
    diagnosis = pair(tmp_path, fault, level=level)
    tolerated = verdicts(diagnosis, step=0, phase="optimizer", role="param", fqn=WEIGHT)
    later = verdicts(diagnosis, step=1, phase="fprop", role="output", fqn=LINEAR)
    assert (tolerated, later) == ({Verdict.WITHIN_TOLERANCE}, {Verdict.DIVERGED}), render(diagnosis)
    assert {step for step, _, _ in origins(diagnosis)} == {0}, render(diagnosis)
    assert "fprop.value" not in {finding.id for finding in diagnosis.findings}


@pytest.mark.parametrize("level", LEVELS)
def test_healthy_runs_have_no_origin(level, tmp_path):
    diagnosis = pair(tmp_path, level=level)
    assert diagnosis.status is Verdict.WITHIN_TOLERANCE, render(diagnosis)


@pytest.mark.parametrize("level", LEVELS)
def test_a_later_fault_of_another_module_is_one(level, tmp_path):
    later = plant(phase="fprop", role="output", fqn=BEFORE, step=1, microbatch=0, value=scaled(1.01))
    diagnosis = pair(tmp_path, DW_ROWS, later, level=level)
    assert (1, "fprop", BEFORE) in origins(diagnosis), render(diagnosis)


def test_a_parameter_with_equal_bits_carries_nothing(tmp_path):
    seen = plant(phase="wgrad", role="wgrad", fqn=WEIGHT, step=0, recorded=scaled(2.0))
    later = plant(phase="fprop", role="output", fqn=LINEAR, step=1, microbatch=0, value=scaled(1.01))
    diagnosis = pair(tmp_path, seen, later, level=Level.STATISTICS, kernels=(), policy="exact")
    assert (1, "fprop", LINEAR) in origins(diagnosis), render(diagnosis)


# The update itself is wrong: of parameters that a norm let pass it is not seen.


def wrong_updates(*seen):
    """Return an optimizer that moves every parameter the wrong way, the ``seen`` ones too far."""
    start = {}

    def keep(name):
        def value(array):
            start[name] = array.copy()
            return array

        return value

    def mirrored(name):
        return lambda array: 2 * start[name] - array * np.float32(1.5 if name in seen else 1)

    names = [f"{module}.{kind}" for module in (BEFORE, LINEAR) for kind in ("weight", "bias")]
    return [
        *(plant(phase="init", fqn=name, value=keep(name)) for name in names),
        *(plant(phase="optimizer", role="param", step=0, fqn=n, value=mirrored(n)) for n in names),
    ]


def test_a_wrong_update_that_a_norm_does_not_show(tmp_path):
    diagnosis = pair(tmp_path, *wrong_updates(BIAS), level=Level.STATISTICS, parameter="norm_update_share")
    tolerated = verdicts(diagnosis, step=0, phase="optimizer", role="param", fqn=f"{BEFORE}.weight")
    later = verdicts(diagnosis, step=1, phase="fprop", role="output", fqn=BEFORE)
    assert (tolerated, later) == ({Verdict.WITHIN_TOLERANCE}, {Verdict.DIVERGED}), render(diagnosis)
    assert {(step, phase) for step, phase, _ in origins(diagnosis)} == {(0, "optimizer")}


def test_a_wrong_gradient_elsewhere_says_nothing_of_the_optimizer(tmp_path):
    later = plant(phase="fprop", role="output", fqn=BEFORE, step=1, microbatch=0, value=scaled(1.01))
    diagnosis = pair(tmp_path, DW_ROWS, later, level=Level.STATISTICS, parameter="norm_update_share")
    assert (1, "fprop", BEFORE) in origins(diagnosis), render(diagnosis)
