"""The trainer on megatron.core, alone in this process: deterministic, and each option does what it says."""

from __future__ import annotations

import dataclasses

import pytest

from mindspeed_precision.errors import ConfigError

pytestmark = [pytest.mark.torch, pytest.mark.megatron, pytest.mark.usefixtures("cpu_megatron")]

STEPS = 2


def train(**options):
    """Return losses, norms and a copy of the parameters after a few steps."""
    from mindspeed_precision.testing.trainer import CpuTrainer, TrainerSettings

    with CpuTrainer(TrainerSettings(**options)) as trainer:
        results = trainer.train(STEPS)
        parameters = {name: value.detach().clone() for name, value in trainer.named_parameters().items()}
    return [result.loss for result in results], [result.grad_norm for result in results], parameters


def assert_same_bits(one, other):
    assert one[:2] == other[:2]
    assert one[2].keys() == other[2].keys()
    assert [name for name, value in one[2].items() if not value.equal(other[2][name])] == []


CONFIGURATIONS = {
    "fp32": {},
    "dropout": {"dropout": 0.1},
    "bf16": {"dtype": "bf16", "distributed_optimizer": True, "overlap": True},
    "fp16": {"dtype": "fp16"},
    "llama": {"swiglu": True, "rmsnorm": True, "untie": True, "kv_groups": 2},
    "mixture": {"experts": 4},
    "fusion": {"gradient_accumulation_fusion": True, "dtype": "bf16"},
    "recompute": {"recompute": True, "dropout": 0.1},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_same_settings_give_the_same_bits(name):
    first = train(**CONFIGURATIONS[name])
    assert_same_bits(first, train(**CONFIGURATIONS[name]))
    losses, norms, _ = first
    assert losses[-1] < losses[0] < 6.0
    assert all(0 < norm < 10 for norm in norms)


@pytest.mark.parametrize("option", [{"seed": 7}, {"data_seed": 7}, {"lr": 2e-3}, {"adam_eps": 1e-3}])
def test_other_settings_give_other_bits(option):
    reference, other = train(), train(**option)
    assert any(not value.equal(other[2][name]) for name, value in reference[2].items())


def test_recomputation_changes_no_bit():
    """Also with dropout: the masks of the second forward are those of the first."""
    assert_same_bits(train(dropout=0.1), train(dropout=0.1, recompute=True))


def test_fusion_takes_another_path_to_the_same_gradients():
    import sys

    from megatron.core.tensor_parallel import layers

    plain, fused = train(), train(gradient_accumulation_fusion=True)
    assert plain[0] == pytest.approx(fused[0], rel=1e-5)
    assert plain[1] == pytest.approx(fused[1], rel=1e-4)
    assert "fused_weight_gradient_mlp_cuda" not in sys.modules  # it was there only while it was asked for
    assert not layers._grad_accum_fusion_available


def test_fusion_is_really_used(monkeypatch):
    from mindspeed_precision.testing.cpu import fused_wgrad

    calls = []
    original = fused_wgrad.wgrad_gemm_accum_fp32

    def counted(*operands):
        calls.append([tuple(operand.shape) for operand in operands])
        original(*operands)

    monkeypatch.setattr(fused_wgrad, "wgrad_gemm_accum_fp32", counted)
    train(gradient_accumulation_fusion=True)
    # four linears in each of two layers, and the output layer; two microbatches and steps
    assert len(calls) == STEPS * 2 * (2 * 4 + 1)


def test_frozen_parameters_stay():
    from mindspeed_precision.testing.trainer import CpuTrainer, TrainerSettings

    with CpuTrainer(TrainerSettings(frozen=("decoder.layers.0.*",))) as trainer:
        before = {name: value.detach().clone() for name, value in trainer.named_parameters().items()}
        trainer.train(STEPS)
        after = trainer.named_parameters()
        still = {name for name, value in after.items() if value.equal(before[name])}
    assert {name for name in before if name.startswith("decoder.layers.0.")} <= still
    assert not any(name.startswith("decoder.layers.1.") and name.endswith("weight") for name in still)


def test_a_pattern_that_matches_nothing_is_an_error():
    with pytest.raises(ConfigError, match=r"no\.such\.layer"):
        train(frozen=("no.such.layer.*",))
    train()  # and the failed trainer left nothing behind


def test_sizes_that_do_not_fit_the_processes_are_an_error():
    with pytest.raises(ConfigError, match="1 processes"):
        train(tp=2)
    train()


def test_each_step_is_reported():
    from mindspeed_precision.testing.trainer import CpuTrainer, TrainerSettings

    seen = []
    with CpuTrainer(TrainerSettings()) as trainer:
        trainer.train(2, on_step=seen.append)
        last = trainer.train_one_step()
    assert [result.step for result in [*seen, last]] == [0, 1, 2]
    assert not any(result.skipped for result in seen)


def test_every_setting_is_documented():
    from mindspeed_precision.testing.trainer import TrainerSettings

    text = TrainerSettings.__doc__ or ""
    assert [field.name for field in dataclasses.fields(TrainerSettings) if f"{field.name}:" not in text] == []
