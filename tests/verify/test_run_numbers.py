"""NaN, overflow, symptoms, gaps and replicas of one run: faults and healthy twins."""

from __future__ import annotations

import numpy as np
import pytest
from run_building import RunBuilder, findings_of, outcome_of, ranks

from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.dump.writer import update_manifest
from mindspeed_precision.symptoms import symptoms
from mindspeed_precision.testing.fake_runs import plant, scaled, write_fake_run

ONES = np.ones(8, np.float32)


def with_nan(value=np.nan, index=3):
    changed = ONES.copy()
    changed[index] = value
    return changed


def flowing(directory, *, output=ONES, gradient=ONES, mask=ONES, dtype="float32", updated=True):
    """Return one step of one layer: forward, backward, update (seen by its hyperparameters)."""
    builder = RunBuilder(dtype=dtype)
    at = {"microbatch": 0, "slot": "0"}
    builder.add("input", "fprop", "layer", mask, microbatch=0, slot="attention_mask")
    builder.add("input", "fprop", "layer", ONES, **at)
    builder.add("output", "fprop", "layer", output, **at)
    builder.add("output", "fprop", "", output, **at)
    builder.add("grad_output", "dgrad", "", gradient, **at)
    builder.add("reduced_grad", "reduce", "w", gradient)
    builder.add("param", "optimizer", "w", ONES)
    if updated:
        builder.add("hyperparameter", "optimizer", "w", np.float64(0.1), slot="lr")
    return builder.write(directory)


def test_the_first_nan_is_named(tmp_path):
    finding = findings_of(flowing(tmp_path / "run", output=with_nan()))["nonfinite.first"]
    assert (finding.where.fqn, finding.where.role.value) == ("layer", "output")
    assert "1 NaN, 0 Inf of 8 elements" in finding.evidence[0]
    assert "its inputs were finite" in finding.remedy


def test_an_additive_mask_may_be_infinite(tmp_path):
    assert not findings_of(flowing(tmp_path / "run", mask=with_nan(-np.inf)), "nonfinite.first")


def test_a_step_that_fp16_skips_may_overflow(tmp_path):
    spoilt = {"gradient": with_nan(np.inf), "dtype": "float16"}
    assert not findings_of(flowing(tmp_path / "skipped", updated=False, **spoilt), "nonfinite.first")
    finding = findings_of(flowing(tmp_path / "made", updated=True, **spoilt))["nonfinite.first"]
    assert finding.where.phase.value == "dgrad"
    float32 = flowing(tmp_path / "float32", updated=False, gradient=with_nan(np.inf))
    assert "nonfinite.first" in findings_of(float32)


def test_where_updates_were_not_recorded_float16_may_have_skipped_them(tmp_path):
    builder = RunBuilder(dtype="float16")
    builder.add("grad_output", "dgrad", "", with_nan(np.inf), microbatch=0, slot="0")
    run = builder.write(tmp_path / "run")
    assert not findings_of(run, "nonfinite.first")
    assert "was not recorded" in outcome_of(run, "nonfinite.first").skipped


def growing(directory, sizes, dtype=np.float32):
    builder = RunBuilder()
    for step, size in enumerate(sizes):
        value = (ONES * size).astype(dtype)
        builder.add("output", "fprop", "layer", value, step=step, microbatch=0, slot="0")
    return builder.write(directory)


@pytest.mark.parametrize(
    ("sizes", "dtype", "expected"),
    [
        ([1.0, 1.2, 1.1, 1.3], np.float16, ""),
        ([100.0, 9000.0], np.float16, "is near"),
        ([1e3, 8e16], np.float32, ""),
        ([1e3, 1e18], np.float32, "is near"),
        ([1, 20, 400, 7000], np.float16, "grows towards"),
        ([1, 2.5, 7, 16], np.float16, ""),
        ([1, 2.5, 7, 16], np.float32, ""),
    ],
)
def test_the_distance_to_overflow(tmp_path, sizes, dtype, expected):
    found = findings_of(growing(tmp_path / "run", sizes, dtype), "nonfinite.near_overflow")
    assert bool(found) == bool(expected)
    if expected:
        assert expected in found["nonfinite.near_overflow"].title


def falling(count=24, noise=0.02, seed=0):
    draw = np.random.default_rng(seed)
    return [5.0 * np.exp(-step / 20) + 1 + draw.normal(0, noise) for step in range(count)]


def at_steps(values):
    return list(enumerate(values))


@pytest.mark.parametrize("seed", range(20))
def test_no_symptom_in_a_healthy_log(seed):
    norms = np.random.default_rng(seed).lognormal(0, 0.5, 24)
    assert not symptoms(at_steps(falling(noise=0.1, seed=seed)), at_steps(norms))


@pytest.mark.parametrize(
    ("losses", "norms", "expected", "step"),
    [
        ([3.0] * 5, [], "symptom.loss_constant", 0),
        ([*falling(10), 9.0, *falling(3)], [], "symptom.loss_spike", 10),
        ([*falling(5, noise=0), 10, 11, 12, 13, 14, 15], [], "symptom.loss_runs_away", 5),
        ([3 + (-1) ** step for step in range(14)], [], "symptom.loss_oscillates", 1),
        (falling(12), [*[1.0, 1.2] * 4, 30.0, 1, 1, 1], "symptom.grad_norm_spike", 8),
    ],
)
def test_symptoms(losses, norms, expected, step):
    found = {one.id: one.step for one in symptoms(at_steps(losses), at_steps(norms))}
    assert found[expected] == step


def test_symptoms_of_numbers_that_are_none():
    assert not symptoms(at_steps([np.nan] * 8), at_steps([np.inf] * 8))


def logging(directory, losses):
    builder = RunBuilder()
    for step, loss in enumerate(losses):
        builder.add("loss", "loss", "loss", np.float64(loss), step=step, slot="lm loss")
        builder.add("grad_norm", "clip", "grad_norm", np.float64(1 + loss / 10), step=step)
    return builder.write(directory)


def test_symptoms_of_a_run(tmp_path):
    assert not findings_of(logging(tmp_path / "healthy", falling()), "symptom.loss_spike")
    finding = findings_of(logging(tmp_path / "faulty", [*falling(10), 20.0]))["symptom.loss_spike"]
    assert finding.where.step == 10
    assert finding.severity.value == "warning"


def reduced(directory, gradients):
    builder = RunBuilder(parameters=tuple(gradients))
    for step in range(3):
        for name, of_steps in gradients.items():
            builder.add("reduced_grad", "reduce", name, ONES * of_steps[step], step=step)
    return builder.write(directory)


def test_gradients_of_zeros(tmp_path):
    healthy = reduced(tmp_path / "healthy", {"a": (1, 1, 1), "b": (0, 0, 1)})
    assert not findings_of(healthy, "symptom.zero_gradient")
    assert outcome_of(healthy, "symptom.zero_gradient").exercised == 2
    finding = findings_of(reduced(tmp_path / "faulty", {"a": (1, 1, 1), "b": (0, 0, 0)}))
    assert finding["symptom.zero_gradient"].where.fqn == "b"


VACUOUS = ("vacuous.no_records", "vacuous.no_gradient", "vacuous.lr_zero", "vacuous.no_update")


def test_a_run_that_did_something(tmp_path):
    assert not findings_of(flowing(tmp_path / "run"), *VACUOUS)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"gradient": ONES * 0}, {"vacuous.no_gradient"}),
        ({"updated": False}, {"vacuous.no_update"}),
    ],
)
def test_a_run_that_did_nothing(tmp_path, changes, expected):
    assert set(findings_of(flowing(tmp_path / "run", **changes), *VACUOUS)) == expected


def test_a_run_without_lr_and_without_steps(tmp_path):
    assert set(findings_of(write_fake_run(tmp_path / "still", lr=0.0), *VACUOUS)) == {"vacuous.lr_zero"}
    assert set(findings_of(write_fake_run(tmp_path / "none", steps=0), *VACUOUS)) == {"vacuous.no_records"}


def test_a_run_that_ended_early(tmp_path):
    builder = RunBuilder(ranks(2))
    builder.add("param", "optimizer", "w", ONES)
    builder.incomplete.add(1)
    finding = findings_of(builder.write(tmp_path / "run"))["coverage.run_stopped"]
    assert "1 of 2 ranks" in finding.title
    assert not findings_of(write_fake_run(tmp_path / "whole", ranks=2), "coverage.run_stopped")


def test_replicas_over_healthy_data_parallel_ranks(tmp_path):
    healthy = write_fake_run(tmp_path / "healthy", ranks=2)
    assert not findings_of(healthy)
    assert outcome_of(healthy, "parallel.replicas_differ").exercised > 50


@pytest.mark.parametrize("phase", ["reduce", "optimizer", "init"])
def test_replicas_over_the_data_parallel_ranks(tmp_path, phase):
    role = "reduced_grad" if phase == "reduce" else "param"
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    fault = plant(phase=phase, role=role, fqn=name, rank=1, value=scaled(1.5))
    finding = findings_of(write_fake_run(tmp_path / "faulty", ranks=2, steps=1, plants=[fault]))
    where = finding["parallel.replicas_differ"].where
    assert (where.fqn, where.phase.value) == (name, phase)
    assert "ranks 0 and ranks 1 hold different bits" in finding["parallel.replicas_differ"].evidence[1]


def reporting(directory, *entries):
    """Return a run that reported something while it ran."""
    builder = RunBuilder()
    for step in range(3):
        state = np.full(8, step, np.uint8)
        builder.add("rng", "batch", "rng", state, step=step, slot="model-parallel-rng")
    builder.write(directory)
    update_manifest(directory, {"findings": list(entries)})
    return load_run(directory)


GAP = {
    "id": "coverage.parameter_without_wgrad",
    "severity": "warning",
    "title": "no dW of w",
    "confidence": 1.0,
}
DRAWN = {"id": "rng.moved_between_steps", "severity": "warning", "title": "model-parallel-rng was drawn from"}
START = {"id": "determinism.too_late", "severity": "warning", "title": "a switch was set too late"}


def test_what_a_run_reported_of_itself(tmp_path):
    healthy = reporting(tmp_path / "healthy", START)
    assert not findings_of(healthy, GAP["id"], DRAWN["id"], START["id"])
    assert outcome_of(healthy, "rng.moved_between_steps").exercised == 2
    found = findings_of(reporting(tmp_path / "run", GAP, GAP, DRAWN), GAP["id"], DRAWN["id"])
    assert found[GAP["id"]].evidence == ("reported by the run while running",)
    assert set(found) == {GAP["id"], DRAWN["id"]}


def gathering(directory, *, late):
    """Return two ranks that update half of the parameters each, and gather them in the next forward pass.

    ``late``: each recorded all of them after the step, half of which were stale; else what it updated alone.
    """
    builder = RunBuilder(
        ranks(2), parameters=("a", "b"), config={"ddp_config": {"overlap_param_gather": True}}
    )
    for rank, own in enumerate("ab"):
        for name in "ab":
            if late or name == own:
                fresh = ONES[:4] * (2 if name == own else 1)
                builder.add("param", "optimizer", name, fresh, rank=rank)
            builder.add("reduced_grad", "reduce", name, ONES[:4], rank=rank)
    return builder.write(directory)


def test_parameters_that_are_gathered_later(tmp_path):
    late = gathering(tmp_path / "late", late=True)
    assert not findings_of(late, "parallel.replicas_differ")
    assert "overlap_param_gather" in outcome_of(late, "parallel.replicas_differ").skipped
    own = gathering(tmp_path / "own", late=False)
    assert not findings_of(own, "parallel.replicas_differ")
    assert not outcome_of(own, "parallel.replicas_differ").skipped


def resumed(directory, *, updates, first_step=3, config=None):
    """Return a training that goes on with step 3, with an optimizer that has made so many updates."""
    builder = RunBuilder(config=config or {})
    for step in (3, 4):
        builder.add("main_grad", "clip", "w", ONES[:4], step=step, slot="clipped")
        counted = updates + step - 3
        for slot, value in (("lr", 0.1), ("beta1", 0.9), ("step", counted)):
            builder.add("hyperparameter", "optimizer", "w", np.float64(value), step=step, slot=slot)
        builder.add("param", "optimizer", "w", ONES[:4] * step, step=step)
    builder.write(directory)
    update_manifest(directory, {"first_step": first_step})
    return load_run(directory)


def test_an_optimizer_that_begins_anew_in_a_resumed_training(tmp_path):
    healthy = resumed(tmp_path / "healthy", updates=3)
    assert "optimizer.state_reset" not in findings_of(healthy)
    assert outcome_of(healthy, "optimizer.state_reset").exercised == 1
    finding = findings_of(resumed(tmp_path / "faulty", updates=0))["optimizer.state_reset"]
    assert (finding.where.step, finding.severity.value) == (3, "warning")
    assert "goes on at step 3" in finding.title


def test_an_optimizer_that_is_meant_to_begin_anew_is_told_as_information(tmp_path):
    config = {"megatron_args": {"no_load_optim": True}}
    finding = findings_of(resumed(tmp_path / "run", updates=0, config=config))["optimizer.state_reset"]
    assert finding.severity.value == "info"


def test_a_training_from_the_start_has_no_state_to_lose(tmp_path):
    outcome = outcome_of(resumed(tmp_path / "run", updates=0, first_step=0), "optimizer.state_reset")
    assert (outcome.applies, outcome.exercised) == (False, 0)
