"""The loss lacks its normaliser: all gradients are larger by a constant."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import DP, FOUR
from silentbench.plants import trainer_built


def scaled(wrapped, instance, args, kwargs):
    wrapped(*args, **kwargs)
    scale = instance.config.grad_scale_func
    instance.config.grad_scale_func = lambda loss: scale(loss) * 32


CASE = case(
    "B139",
    "https://github.com/volcengine/verl/issues/6609",
    "https://github.com/volcengine/verl/issues/5983",
    healthy=DP,
    reference=FOUR,
    patches=(trainer_built(scaled, "the normaliser got lost between tuples"),),
    answers=(
        by_compare(0, "dgrad", "(model) output_layer", "loss.gradient_scaled", says="32"),
        by_check(0, "dgrad", "(model) output_layer", "loss.gradient_scaled"),
    ),
)
