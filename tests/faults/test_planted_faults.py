"""One fault each, found at the right step, phase and parameter; and its healthy twin, which gives no finding.

Real megatron-core, real runs. The healthy twin goes through the same plant with a value that changes nothing.
"""

from __future__ import annotations

import json

import pytest

from mindspeed_precision.records import Phase, Role, Verdict

pytestmark = [pytest.mark.torch, pytest.mark.megatron]

LAYER = "decoder.layers.1.mlp.linear_fc1"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("baseline")


@pytest.fixture
def compare(cpu_megatron, tmp_path, directory):
    """Record a planted candidate, and compare it with the baseline, which is recorded once for all."""

    def run(plant=None, *, baseline=None, **options):
        from mindspeed_precision import compare_runs
        from mindspeed_precision.testing.recorded import record_training
        from mindspeed_precision.testing.trainer import TrainerSettings

        ordinary = directory / "run" if not baseline else tmp_path / "baseline"
        if not ordinary.exists():
            record_training(TrainerSettings(**(baseline or {})), ordinary)
        record_training(TrainerSettings(**options), tmp_path / "candidate", plant=plant)
        return compare_runs(ordinary, tmp_path / "candidate")

    return run


def assert_healthy(diagnosis):
    assert diagnosis.status is Verdict.IDENTICAL
    assert diagnosis.findings == ()
    assert diagnosis.origins == ()
    coverage = diagnosis.coverage
    assert coverage.parameters == coverage.parameters_with_wgrad > 0
    assert coverage.records == coverage.matched > 1000


def ids(diagnosis):
    return [finding.id for finding in diagnosis.findings]


def test_a_run_and_its_repeat_are_identical(compare):
    assert_healthy(compare())


def decay_of_first_group(times: float):
    """Scale the weight decay of one parameter group; 1 is the healthy twin."""

    def plant(trainer):
        group = max(trainer.optimizer.param_groups, key=lambda group: group["wd_mult"])
        group["wd_mult"] *= times

    return plant


def test_a_wrong_weight_decay_of_one_group(compare):
    diagnosis = compare(decay_of_first_group(0.5))
    first = diagnosis.first_divergence
    assert (first.key.step, first.key.phase, first.key.role) == (0, Phase.OPTIMIZER, Role.HYPERPARAMETER)
    assert first.key.slot in ("weight_decay", "wd_mult")
    assert "optimizer.weight_decay" in ids(diagnosis)
    finding = next(f for f in diagnosis.findings if f.id == "optimizer.weight_decay")
    text = " ".join((finding.title, *finding.evidence))
    assert "0.1" in text
    assert "0.05" in text
    # only the decayed group: no bias and no norm is accused
    assert {key.fqn.rpartition(".")[2] for key in finding.explains} == {"weight"}
    assert not any("layernorm" in key.fqn for key in finding.explains)


def test_the_right_weight_decay(compare):
    assert_healthy(compare(decay_of_first_group(1.0)))


def test_a_frozen_parameter(compare):
    diagnosis = compare(frozen=(f"*{LAYER}.weight",))
    assert diagnosis.status is Verdict.DIVERGED
    finding = diagnosis.findings[0]
    assert finding.id in ("model.frozen_parameter", "weights.frozen")
    assert f"{LAYER}.weight" in " ".join((finding.title, *finding.evidence))
    first = diagnosis.first_divergence
    assert (first.key.step, first.key.phase) == (0, Phase.WGRAD)
    assert LAYER in first.key.fqn


def test_the_same_parameter_frozen_on_both_sides(compare):
    frozen = (f"*{LAYER}.weight",)
    assert_healthy(compare(baseline={"frozen": frozen}, frozen=frozen))


def scaled_dw(scale: float):
    """Scale dW of one layer where it arrives; 1 is the healthy twin."""

    def plant(trainer):
        weight = dict(trainer.model[0].module.named_parameters())[f"{LAYER}.weight"]
        weight.register_hook(lambda grad: grad * scale)

    return plant


def test_dw_of_one_layer_scaled(compare):
    diagnosis = compare(scaled_dw(1.001))
    first = diagnosis.first_divergence
    assert (first.key.step, first.key.microbatch, first.key.phase) == (0, 0, Phase.WGRAD)
    assert first.key.fqn == f"{LAYER}.weight"
    assert diagnosis.findings[0].id == "wgrad.scaled"
    assert "1.001" in " ".join((diagnosis.findings[0].title, *diagnosis.findings[0].evidence))
    assert {origin.key.fqn for origin in diagnosis.origins} == {f"{LAYER}.weight"}


def test_dw_of_one_layer_scaled_by_one(compare):
    assert_healthy(compare(scaled_dw(1.0)))


def test_another_adam_epsilon(compare):
    diagnosis = compare(adam_eps=1e-6)
    first = diagnosis.first_divergence
    assert (first.key.step, first.key.phase, first.key.role, first.key.slot) == (
        0,
        Phase.OPTIMIZER,
        Role.HYPERPARAMETER,
        "eps",
    )
    assert diagnosis.findings[0].id == "optimizer.eps"


def test_the_same_adam_epsilon(compare):
    assert_healthy(compare(baseline={"adam_eps": 1e-6}, adam_eps=1e-6))


@pytest.mark.matrix
@pytest.mark.parametrize("shuffled", [True, False], ids=["shuffled", "healthy"])
def test_the_data_of_one_rank_shuffled(megatron, tmp_path, shuffled):
    from pathlib import Path

    from preloaded import run_training

    from mindspeed_precision import compare_runs
    from mindspeed_precision.flow import compare_in_full
    from mindspeed_precision.testing.folded import folded, told

    script = Path(__file__).parent / "scripts" / "record_with_data_seed.py"
    for name, seed in (("baseline", 1234), ("candidate", 99 if shuffled else 1234)):
        run_training(
            script,
            [str(tmp_path / name), json.dumps({"distributed_optimizer": True}), str(seed)],
            processes=2,
            megatron=megatron("0.17.1"),
            log=tmp_path / f"{name}.log",
        )
    diagnosis = compare_runs(tmp_path / "baseline", tmp_path / "candidate")
    less = folded(tmp_path / "baseline", tmp_path / "candidate")
    assert told(less) == told(compare_in_full(tmp_path / "baseline", tmp_path / "candidate"))
    if not shuffled:
        assert_healthy(diagnosis)
        return
    first = diagnosis.first_divergence
    assert (first.key.step, first.key.microbatch, first.key.phase) == (0, 0, Phase.BATCH)
    assert first.ranks == (1,)
    assert diagnosis.findings[0].id.startswith("data.batch")
    assert all(origin.key.phase is Phase.BATCH for origin in diagnosis.origins)
