"""The schedule is stepped twice when a training is resumed: here, after the first step."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare, by_verify
from silentbench.case import case, plant
from silentbench.layouts import ONE
from silentbench.plants import training_step


def decaying(wrapped, instance, args, kwargs):
    scheduler = wrapped(*args, **kwargs)
    scheduler.lr_decay_style, scheduler.lr_decay_steps, scheduler.min_lr = "linear", 10, 0.0
    for group in scheduler.optimizer.param_groups:
        group["min_lr"] = 0.0
    return scheduler


def once_more(wrapped, instance, args, kwargs):
    if instance.step == 1:
        instance.scheduler.step(increment=1)
    return wrapped(*args, **kwargs)


DECAY = plant(
    "mindspeed_precision.testing.model_building:build_scheduler",
    decaying,
    "(optimizer, settings)",
    "a learning rate that decays",
)

CASE = case(
    "B037",
    "https://github.com/THUDM/slime/issues/1546",
    "https://github.com/THUDM/slime/issues/1775",
    "https://github.com/radixark/miles/pull/1627",
    "https://github.com/verl-project/verl/issues/7953",
    healthy=ONE.but(steps=3, patches=(DECAY,)),
    patches=(training_step(once_more, "scheduler.step ran while loading and while training"),),
    answers=(
        by_compare(1, "optimizer", "*", "optimizer.lr", roles="hyperparameter"),
        by_verify("optimizer.lr schedule.lr_differs", "*", step=1),
        by_check(1, "optimizer", "*", "schedule.stepped_wrongly schedule.lr"),
    ),
)
