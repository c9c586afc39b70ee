"""Weight decay is applied to norms and biases, too: all parameters are in one group."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare, by_verify
from silentbench.case import case, plant
from silentbench.layouts import ONE


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
        by_compare(
            0, "optimizer", "*.bias *layernorm.weight", "optimizer.weight_decay", roles="hyperparameter"
        ),
        by_verify("optimizer.groups_differ optimizer.weight_decay", "*.bias *layernorm.weight"),
        by_verify("optimizer.groups_differ optimizer.weight_decay", "*.bias *layernorm.weight", step=0),
        by_check(0, "optimizer", "*.bias *layernorm.weight", "optimizer.decay_of_norm_or_bias"),
    ),
)
