"""The data start again from the first sample when a training is resumed: here, after the first step."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare, by_verify
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import batches


def again(wrapped, instance, args, kwargs):
    seen = []
    for batch in wrapped(*args, **kwargs):
        seen.append({key: value.clone() for key, value in batch.items()})
        yield seen[len(seen) - 1 if len(seen) <= 2 else len(seen) - 3]


CASE = case(
    "B086",
    "https://github.com/NVIDIA/Megatron-LM/commit/e2a4d42675",
    healthy=ONE.but(steps=3),
    patches=(batches(again, "consumed samples came from the arguments instead of the checkpoint"),),
    answers=(
        by_compare(1, "batch", "*", "data.batch_differs data.batch_order"),
        by_check(1, "batch", "*", "data.repeated data.repeated_in_step"),
        by_verify("data.batch_differs data.shifted", step=1),
    ),
)
