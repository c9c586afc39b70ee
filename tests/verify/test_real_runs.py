"""Real trainings of megatron-core, healthy and with real bugs: what ``verify`` and ``check`` say of them."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("torch")

import torch

from mindspeed_precision.records import Severity
from mindspeed_precision.verify.check import check_run
from mindspeed_precision.verify.verify import verify_runs

pytestmark = [pytest.mark.torch, pytest.mark.megatron, pytest.mark.matrix]


def groups_of(trainer):
    return [group for group in trainer.optimizer.param_groups if group["params"]]


def decayed_norms(trainer):
    for group in groups_of(trainer):
        group["wd_mult"] = 1.0
        group["weight_decay"] = trainer.settings.weight_decay


def other_beta(trainer):
    for group in groups_of(trainer):
        group["betas"] = (0.9, 0.95)  # the configuration object says 0.999


def other_epsilon(trainer):
    for group in groups_of(trainer):
        group["eps"] = 1e-5


def norm_epsilon(trainer):
    trainer.model[0].module.decoder.layers[1].input_layernorm.eps = 1e-6


def weight(trainer, name):
    return trainer.named_parameters()[f"module.{name}" if name not in trainer.named_parameters() else name]


def interleaved(trainer):
    settings = trainer.settings
    qkv = weight(trainer, "decoder.layers.0.self_attention.linear_qkv.weight").data
    by_head = qkv.view(settings.heads, 3, -1, qkv.shape[1])
    qkv.copy_(by_head.transpose(0, 1).reshape(qkv.shape).clone())


def through_float16(trainer):
    for parameter in trainer.named_parameters().values():
        parameter.data.copy_(parameter.data.to(torch.float16).float())


def never_recomputed(trainer):
    decoder = trainer.model[0].module.decoder
    decoder.config = dataclasses.replace(decoder.config, recompute_granularity=None, recompute_method=None)


CASES = {
    "B013 norms decayed": (decayed_norms, {}, {"optimizer.groups_differ", "optimizer.weight_decay"}, set()),
    "B014 a beta that is ignored": (other_beta, {}, {"optimizer.beta"}, {"optimizer.not_as_configured"}),
    "B029 another epsilon": (other_epsilon, {}, {"optimizer.eps"}, {"optimizer.not_as_configured"}),
    "B028 a norm with its own epsilon": (
        norm_epsilon,
        {},
        {"model.module_differs"},
        {"config.not_in_effect"},
    ),
    "B026 QKV by head": (interleaved, {}, {"weights.permuted"}, set()),
    "B115 through float16": (through_float16, {}, {"weights.cast"}, set()),
    "B045 another order of samples": (None, {"data_seed": 99}, {"data.batch_differs"}, set()),
    "B078 other draws": (None, {"seed": 99}, {"weights.initial_differs"}, set()),
}


@pytest.fixture(scope="module")
def record(cpu_megatron, tmp_path_factory):
    """Return a function that records a training of one step, with the elements of the initial weights."""
    from mindspeed_precision.testing.recorded import record_training
    from mindspeed_precision.testing.trainer import TrainerSettings

    directory = tmp_path_factory.mktemp("runs")
    keep = "capture.rules=[{role: param, phase: init, level: tensor}]"

    def run(name, plant=None, **settings):
        out = directory / name
        record_training(TrainerSettings(**settings), out, steps=1, plant=plant, overrides=(keep,))
        return out

    return run


@pytest.fixture(scope="module")
def healthy(record):
    return record("healthy")


OWN = ("config", "optimizer.param", "optimizer.not_as")
"""Findings of ``check`` about what was asked for."""


def errors(answer):
    return {finding.id for finding in answer.findings if finding.severity is Severity.ERROR}


def test_a_healthy_run_and_its_repeat(record, healthy):
    again = record("again")
    answer = verify_runs(healthy, again)
    assert answer.findings == ()
    assert min(one.exercised for one in answer.outcomes if one.applies and not one.skipped) > 0
    found = check_run(healthy)
    assert {"config.not_in_effect", "optimizer.parameter_in_no_group"} <= {
        one.name for one in found.outcomes if one.exercised
    }
    assert not errors(found)


@pytest.mark.parametrize("name", CASES)
def test_a_real_bug(record, healthy, name):
    plant, settings, in_pair, alone = CASES[name]
    run = record(name.replace(" ", "_"), plant, **settings)
    assert errors(verify_runs(healthy, run)) >= in_pair
    assert {id_ for id_ in errors(check_run(run)) if id_.startswith(OWN)} == alone


def test_b110_recomputation_without_effect(record):
    run = record("not_recomputed", never_recomputed, recompute=True)
    (finding,) = (one for one in check_run(run).findings if one.id == "config.not_in_effect")
    assert "no module was called again" in finding.title
    assert "config.not_in_effect" not in {
        one.id for one in check_run(record("recomputed", recompute=True)).findings
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bf16", "experts": 2},
        {"dtype": "fp16", "rmsnorm": True, "swiglu": True, "untie": True},
        {"frozen": ("*embedding*",), "distributed_optimizer": True},
    ],
)
def test_other_healthy_runs(record, settings):
    run = record("-".join(settings), **settings)
    assert not {id_ for id_ in errors(check_run(run)) if id_.startswith(("config", "optimizer.param"))}
    assert verify_runs(run, run).findings == ()
