"""The backward of attention overflows for some data: here in the third step."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import attention, trainer_built

SEEN = {"backward": 0}


def overflow(grad):
    SEEN["backward"] += 1
    return grad * 1e18 if SEEN["backward"] == 9 else grad  # two layers, two microbatches: the first of step 2


def begin(wrapped, instance, args, kwargs):
    SEEN["backward"] = 0
    wrapped(*args, **kwargs)


def fragile(wrapped, instance, args, kwargs):
    query, key, value, *rest = args
    value = value.view_as(value)
    value.register_hook(overflow)
    return wrapped(query, key, value, *rest, **kwargs)


CASE = case(
    "B148",
    "flash-attention-npu issue 44",
    healthy=ONE.but(steps=3),
    patches=(
        trainer_built(begin, "counted from the start"),
        attention(fragile, "sequences shorter than a block"),
    ),
    answers=(
        by_compare(
            2,
            "dgrad",
            "decoder.layers.1.self_attention.core_attention*",
            "dgrad.value dgrad.scaled",
            roles="grad_input",
        ),
        by_check(
            2, "dgrad", "decoder.layers.1.self_attention*", "nonfinite.near_overflow symptom.grad_norm_spike"
        ),
    ),
)
