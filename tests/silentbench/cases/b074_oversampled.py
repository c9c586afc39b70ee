"""A blended data set draws samples too often: the same microbatch comes twice in a step."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare, by_verify
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import batches


def too_often(wrapped, instance, args, kwargs):
    for number, batch in enumerate(wrapped(*args, **kwargs)):
        if number == 0:
            first = {key: value.clone() for key, value in batch.items()}
        yield {key: value.clone() for key, value in first.items()} if number == 3 else batch


CASE = case(
    "B074",
    "https://github.com/NVIDIA/Megatron-LM/commit/85676ca489",
    healthy=ONE.but(steps=3),
    patches=(batches(too_often, "the weights of the blend were normalised again"),),
    answers=(
        by_compare(1, "batch", "*", "data.batch_differs data.batch_order"),
        by_check(1, "batch", "*", "data.repeated data.repeated_in_step"),
        by_verify("data.batch_differs data.shifted", step=1),
    ),
)
