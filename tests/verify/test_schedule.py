"""The recomputed schedule gives Megatron's own numbers, bit for bit, at every step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed_precision.errors import ConfigError
from mindspeed_precision.verify.schedule import batch_sizes_of, curves_of, schedule_of

ARGUMENTS = {
    "train_iters": 40,
    "global_batch_size": 8,
    "micro_batch_size": 2,
    "data_parallel_size": 1,
    "lr": 3e-4,
    "min_lr": 1e-5,
    "lr_warmup_init": 1e-6,
    "lr_warmup_iters": 5,
    "lr_decay_style": "cosine",
    "weight_decay": 0.1,
}
GROWING = {"start_weight_decay": 0.01, "end_weight_decay": 0.1}
SCHEDULES = {
    "cosine": {},
    "constant": {"lr_decay_style": "constant"},
    "linear that ends before training does": {"lr_decay_style": "linear", "lr_decay_iters": 25},
    "inverse square root": {"lr_decay_style": "inverse-square-root"},
    "a fraction of warm-up": {"lr_warmup_fraction": 0.13, "lr_warmup_iters": 0},
    "no warm-up": {"lr_warmup_iters": 0},
    "weight decay grows by a cosine": {**GROWING, "weight_decay_incr_style": "cosine"},
    "weight decay grows linearly": {**GROWING, "weight_decay_incr_style": "linear"},
    **{
        f"WSD, {style}": {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 11, "lr_wsd_decay_style": style}
        for style in ("linear", "cosine", "exponential", "minus_sqrt")
    },
}


def megatrons(arguments):
    """Step Megatron's own scheduler as its loop does, and return lr and weight decay of every step."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    group = {"wd_mult": 1.0}
    size, steps = arguments["global_batch_size"], arguments["train_iters"]
    decay = (arguments.get("lr_decay_iters") or steps) * size
    fraction, wsd = arguments.get("lr_warmup_fraction"), arguments.get("lr_wsd_decay_iters")
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=arguments["lr_warmup_init"],
        max_lr=arguments["lr"],
        min_lr=arguments["min_lr"],
        lr_warmup_steps=arguments["lr_warmup_iters"] * size if fraction is None else fraction * decay,
        lr_decay_steps=decay,
        lr_decay_style=arguments["lr_decay_style"],
        start_wd=arguments.get("start_weight_decay", arguments["weight_decay"]),
        end_wd=arguments.get("end_weight_decay", arguments["weight_decay"]),
        wd_incr_steps=steps * size,
        wd_incr_style=arguments.get("weight_decay_incr_style", "constant"),
        wsd_decay_steps=None if wsd is None else wsd * size,
        lr_wsd_decay_style=arguments.get("lr_wsd_decay_style"),
    )
    seen = []
    for _ in range(steps):
        seen.append((group["lr"], group["weight_decay"]))
        scheduler.step(increment=size)
    return seen


@pytest.mark.torch
@pytest.mark.megatron
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_step_is_megatrons_own(cpu_megatron, name):
    arguments = {**ARGUMENTS, **SCHEDULES[name]}
    found = curves_of(arguments)
    assert list(zip(found.lr, found.weight_decay, strict=True)) == megatrons(arguments)


@pytest.mark.torch
@pytest.mark.megatron
def test_batch_sizes_are_megatrons_own(cpu_megatron):
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    calculator = RampupBatchsizeNumMicroBatchesCalculator(
        global_batch_size=32,
        micro_batch_size=2,
        data_parallel_size=1,
        decrease_batch_size_if_needed=False,
        rank=1,
        start_global_batch_size=8,
        batch_size_increment=8,
        ramup_samples=100,
    )
    arguments = {**ARGUMENTS, "global_batch_size": 32, "rampup_batch_size": ["8", "8", "100"]}
    sizes = batch_sizes_of(arguments)
    for consumed in range(130):
        calculator.update(consumed, consistency_check=False)
        assert sizes.at(consumed) == calculator.get_current_running_global_batch_size(), consumed
    curves = curves_of(arguments)
    assert curves.batch_size[:6] == [8, 8, 8, 8, 8, 16]
    assert curves.consumed[:6] == [0, 8, 16, 24, 32, 40]


def test_steps_of_other_sizes_move_the_schedule_by_their_samples():
    ramped = curves_of({**ARGUMENTS, "rampup_batch_size": [2, 2, 60]})
    schedule = schedule_of(ARGUMENTS)
    assert ramped.lr == [schedule.lr(consumed) for consumed in ramped.consumed]
    assert ramped.lr != curves_of(ARGUMENTS).lr


def test_a_megatron_with_step_schedules_ignores_the_ramp_up():
    ramp = {**ARGUMENTS, "rampup_batch_size": [2, 2, 60]}
    assert curves_of({**ramp, "step_batch_size_schedule": None}).batch_size == [8] * 40
    text = {"step_batch_size_schedule": "0:4 1K:8, 2k:16", "seq_length": 10}
    assert curves_of({**ARGUMENTS, **text}).batch_size[24:28] == [4, 8, 8, 8]


def test_samples_instead_of_iterations():
    arguments = {**ARGUMENTS, "train_iters": None, "train_samples": 320, "lr_warmup_samples": 40}
    assert curves_of(arguments).lr == curves_of(ARGUMENTS).lr
    assert curves_of({**arguments, "train_iters": 40}).lr == curves_of(ARGUMENTS).lr  # as after validation


@pytest.mark.parametrize(
    "change",
    [
        {"lr": None},
        {"train_iters": None},
        {"lr_decay_style": "polynomial"},
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 5},
        {"weight_decay_incr_style": "square"},
        {"rampup_batch_size": [8, 8, 100]},
        {"rampup_batch_size": ["a"]},
        {"step_batch_size_schedule": "10:4", "seq_length": 1},
        {"step_batch_size_schedule": "nonsense", "seq_length": 1},
    ],
)
def test_what_is_no_schedule_is_refused(change):
    with pytest.raises(ConfigError):
        curves_of({**ARGUMENTS, **change})
