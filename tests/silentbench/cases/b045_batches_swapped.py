"""The order of the batches differs: the first microbatch of step 0 and of step 1 are swapped.

The twin swaps the two microbatches of a step: its gradients differ by rounding alone.
"""

from __future__ import annotations

from itertools import islice

from silentbench.answers import by_compare, by_verify
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import batches


def across_steps(wrapped, instance, args, kwargs):
    stream = wrapped(*args, **kwargs)
    first = list(islice(stream, 4))
    yield from (first[2], first[1], first[0], first[3])
    yield from stream


CASE = case(
    "B045",
    "https://gitcode.com/Ascend/MindSpeed-LLM commit 4c59323f",
    "https://github.com/NVIDIA/Megatron-LM/issues/907",
    "llm.c PR 792",
    "https://gitcode.com/Ascend/MindSpeed-Core-MS commit 0a4e304",
    healthy=ONE,
    patches=(batches(across_steps, "the index was shuffled with another seed"),),
    answers=(
        by_compare(0, "batch", "*", "data.batch_order data.batch_differs"),
        by_verify("data.batch_order data.batch_differs", "*", step=0),
    ),
)
