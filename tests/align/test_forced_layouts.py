"""Teacher forcing across layouts: a state goes into any other, and few wrong rows are found at any step."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from mindspeed_precision.flow import compare_runs
from mindspeed_precision.records import INIT_STEP, Diagnosis, Phase, Role, Verdict
from mindspeed_precision.report.console import render

pytestmark = [pytest.mark.torch, pytest.mark.megatron, pytest.mark.matrix]

MODEL = {"hidden": 64, "kv_groups": 2}
GATED = {**MODEL, "swiglu": True, "rmsnorm": True, "untie": True}
MIXTURE = {**GATED, "experts": 4}
TARGET = "decoder.layers.1.mlp.linear_fc1.weight"
QUIET = ("capture.level=tensor", "capture.modules=false", "capture.collectives=false")
THIN = ("capture.modules=false", "capture.collectives=false")
STATES = "capture.rules=[{role: '*param', level: tensor}, {role: 'exp_avg*', level: tensor}]"


def require_healthy(diagnosis: Diagnosis, steps: str) -> None:
    assert diagnosis.status in (Verdict.WITHIN_TOLERANCE, Verdict.IDENTICAL), render(diagnosis)
    assert diagnosis.findings == ()
    (note,) = [note for note in diagnosis.notes if "took weights and optimizer state from" in note]
    assert f"before steps {steps}" in note
    initial = [c for c in diagnosis.comparisons if c.key.step == INIT_STEP]
    assert {c.verdict for c in initial} == {Verdict.IDENTICAL}
    updated = {c.key.role for c in diagnosis.comparisons if c.key.phase is Phase.OPTIMIZER}
    assert {Role.PARAM, Role.EXP_AVG, Role.EXP_AVG_SQ} <= updated


def require_wrong_rows(diagnosis: Diagnosis, step: int) -> None:
    """Require the fault of ``wrong_rows`` in one step: the rows, and a norm that hardly moves."""
    found = [o for o in diagnosis.origins if o.key.step == step]
    assert {(o.key.fqn, o.key.role) for o in found} == {(TARGET, Role.WGRAD)}, render(diagnosis)
    for metrics in (origin.comparison.metrics for origin in found):
        assert metrics["norm_change"] < 1e-4
        assert metrics["worst_rows_rel_err"] > 0.86
        assert 40 <= metrics["worst_rows_first"] <= 48 - metrics["worst_rows_count"]


@pytest.mark.long
def test_eight_wrong_rows_of_one_gradient_are_found(record):
    baseline = record(1, **MODEL)
    diagnosis = compare_runs(baseline, record(2, start=baseline, plant="wrong_rows", tp=2, **MODEL))
    assert diagnosis.first_divergence.key.step == 0
    require_wrong_rows(diagnosis, 0)


def test_eight_wrong_rows_at_step_3_are_found_as_at_step_0(record):
    """Each step begins with the state of the baseline: bounds do not grow, and nothing propagates."""
    baseline = record(1, steps=4, **MODEL)
    require_healthy(compare_runs(baseline, record(2, steps=4, reference=baseline, tp=2, **MODEL)), "0-3")
    settings = {"steps": 4, "reference": baseline, "tp": 2, **MODEL}
    diagnosis = compare_runs(baseline, record(2, plant="wrong_rows_at_step_3", **settings))
    assert {origin.key.step for origin in diagnosis.origins} == {3}
    require_wrong_rows(diagnosis, 3)


@pytest.mark.long
def test_forced_steps_are_calibrated_by_a_forced_run_with_noise(record):
    """Three in a million in one layer's backward pass, at step 3; a free run with noise does not tell."""
    baseline = record(1, steps=4, **MODEL)
    noisy = record(1, steps=4, reference=baseline, more=(*QUIET, "perturb.epsilon=auto"), **MODEL)
    settings = {"steps": 4, "reference": baseline, "tp": 2, **MODEL}
    healthy = compare_runs(baseline, record(2, **settings), calibrate=[noisy])
    require_healthy(healthy, "0-3")
    for step in range(4):
        assert sum("calibrated" in c.reason for c in healthy.comparisons if c.key.step == step) > 50
    candidate = record(2, plant="scaled_dgrad_at_step_3", **settings)
    assert compare_runs(baseline, candidate).status is Verdict.WITHIN_TOLERANCE
    diagnosis = compare_runs(baseline, candidate, calibrate=[noisy])
    assert {origin.key.step for origin in diagnosis.origins} == {3}, render(diagnosis)
    first = diagnosis.first_divergence
    assert first.key.fqn.startswith("decoder.layers.1.mlp")
    assert "calibrated" in first.comparison.reason
    free = record(1, steps=4, start=baseline, more=(*QUIET, "perturb.epsilon=auto"), **MODEL)
    by_free = compare_runs(baseline, candidate, calibrate=[free])
    assert by_free.status is Verdict.WITHIN_TOLERANCE
    assert any("no perturbed run began as the candidate did" in note for note in by_free.notes)


@pytest.mark.long
def test_wrong_rows_of_every_step_are_found_in_every_step(record):
    baseline = record(1, steps=4, **MODEL)
    settings = {"steps": 4, "reference": baseline, "tp": 2, **MODEL}
    diagnosis = compare_runs(baseline, record(2, plant="wrong_rows", **settings))
    for step in range(4):
        require_wrong_rows(diagnosis, step)


@pytest.mark.long
@pytest.mark.parametrize("level", ["statistics", "sketch"])
def test_wrong_rows_without_elements(level, record):
    """A sketch sees them at any step. A norm moves by 2e-5, which is seen where the bound has not grown.

    In a free run statistics see them in the mean of gradients alone, whose norm they do move.
    """
    more = (*THIN, f"capture.level={level}")
    baseline = record(1, steps=4, more=(*more, STATES), **MODEL)
    settings = {"steps": 4, "more": more, "tp": 2, **MODEL}
    require_healthy(compare_runs(baseline, record(2, reference=baseline, **settings)), "0-3")
    free = compare_runs(baseline, record(2, start=baseline, plant="wrong_rows_at_step_3", **settings))
    first = free.first_divergence.key
    role = Role.WGRAD if level == "sketch" else Role.EXP_AVG
    assert (first.step, first.fqn, first.role) == (3, TARGET, role), render(free)
    forced = compare_runs(baseline, record(2, reference=baseline, plant="wrong_rows_at_step_3", **settings))
    found = {(o.key.step, o.key.fqn, o.key.role) for o in forced.origins}
    assert (3, TARGET, Role.WGRAD) in found, render(forced)
    assert {place[:2] for place in found} == {(3, TARGET)}, render(forced)


LAYOUTS = {
    "TP2 with SP": (2, {"tp": 2, "sequence_parallel": True, **GATED}, {}),
    "PP2, a tied embedding": (2, {"pp": 2, **MODEL}, {}),
    "PP2, interleaved": (2, {"pp": 2, "vpp": 2, "layers": 4, **MODEL}, {}),
    "DP2, distributed": (2, {"distributed_optimizer": True, **MODEL}, {"microbatches": 4}),
    "DP2, bf16": (2, {"distributed_optimizer": True, "dtype": "bf16", **MODEL}, {"microbatches": 4}),
    "CP2": (2, {"cp": 2, **MODEL}, {}),
    "EP2, distributed": (2, {"ep": 2, "distributed_optimizer": True, **MIXTURE}, {"microbatches": 4}),
    "TP2 EP2, experts whole": (2, {"tp": 2, "sequence_parallel": True, "ep": 2, "etp": 1, **MIXTURE}, {}),
    "TP2 PP2, bf16": (4, {"tp": 2, "pp": 2, "sequence_parallel": True, "dtype": "bf16", **GATED}, {}),
}
SPLITS = ("tp", "pp", "vpp", "cp", "ep", "etp", "sequence_parallel", "distributed_optimizer")


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_state_goes_into_any_layout_and_back(name, record):
    """A free run of a layout is the reference of one process, and the other way round."""
    processes, settings, more = LAYOUTS[name]
    split = record(processes, steps=3, **settings)
    alone = {key: value for key, value in settings.items() if key not in SPLITS} | more
    require_healthy(compare_runs(split, record(1, steps=3, reference=split, **alone)), "0-2")
    whole = record(1, steps=3, **alone)
    back = record(processes, steps=3, reference=whole, **settings)
    require_healthy(compare_runs(whole, back), "0-2")


@pytest.mark.long
@pytest.mark.parametrize("version", ["0.12.1", "0.19.2"])
def test_versions_of_the_core_take_a_state(version, record):
    settings = {"version": version, "steps": 3, "dtype": "bf16", **GATED}
    baseline = record(1, **settings)
    ranges = record(2, reference=baseline, microbatches=1, distributed_optimizer=True, **settings)
    require_healthy(compare_runs(baseline, ranges), "0-2")
    split = record(2, reference=baseline, tp=2, sequence_parallel=True, **settings)
    require_healthy(compare_runs(baseline, split), "0-2")


@pytest.mark.long
@pytest.mark.parametrize("split", [{"pp": 2}, {"tp": 2}], ids=["PP2", "TP2"])
def test_two_faults_are_two_origins_in_another_layout(split, record):
    """The second is seen although the first, before it, changes all that it is computed from."""
    more = ("capture.level=tensor",)
    baseline = record(1, more=more, **MODEL)
    candidate = record(2, more=more, start=baseline, plant="forward_and_rows", **split, **MODEL)
    diagnosis = compare_runs(baseline, candidate)
    first = diagnosis.first_divergence
    assert (first.key.phase, first.key.fqn, first.key.step) == (Phase.FPROP, "decoder.layers.0.mlp", 0)
    own = [origin for origin in diagnosis.origins if origin.own]
    assert {(o.key.phase, o.key.fqn, o.key.step) for o in own} == {(Phase.WGRAD, TARGET, 0)}
    assert "explains" in render(diagnosis)
