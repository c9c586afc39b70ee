"""Weight decay is applied to norms and biases, too: all parameters are in one group."""

from __future__ import annotations

from silentbench.case import Answer, case, plant
from silentbench.layouts import ONE

PLAIN = ("*.bias", "*layernorm.weight")


def none(wrapped, instance, args, kwargs):
    return {}


CASE = case(
    "B013",
    "https://gitcode.com/Ascend/MindSpeed-Core-MS commit ce9a414",
    "https://github.com/bigscience-workshop/Megatron-DeepSpeed/pull/262",
    "https://github.com/ServiceNow/Fast-LLM/issues/542",
    healthy=ONE,
    patches=(
        plant(
            "megatron.core.optimizer:get_standard_config_overrides",
            none,
            "(config)",
            "the group without decay was lost",
        ),
    ),
    answers=(
        Answer(
            by=("compare",),
            step=0,
            phases=("optimizer",),
            fqn=PLAIN,
            roles=("hyperparameter",),
            ids=("optimizer.weight_decay",),
        ),
        Answer(
            by=("verify",),
            step=-1,
            phases=("init", "optimizer"),
            fqn=PLAIN,
            ids=("groups.*",),
            says=("wd_mult",),
        ),
        Answer(
            by=("verify",),
            step=0,
            phases=("init", "optimizer"),
            fqn=PLAIN,
            ids=("groups.*",),
            says=("wd_mult",),
        ),
    ),
)
