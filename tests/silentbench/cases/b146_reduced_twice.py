"""A predicate is used without a call and so is always true: a reduction runs twice."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.layouts import ONE, TP


def twice(wrapped, instance, args, kwargs):
    once = wrapped(*args, **kwargs)
    return wrapped(once, *args[1:], **kwargs) if args else wrapped(**{**kwargs, "input_": once})


PLACE = "embedding embedding.word_embeddings"
CASE = case(
    "B146",
    "https://github.com/mindspore-ai/hyper-parallel/issues/764",
    healthy=TP,
    reference=ONE,
    patches=(
        plant(
            "megatron.core.tensor_parallel.mappings:_reduce",
            twice,
            "(input_, group)",
            "the method itself was asked instead of its result",
        ),
    ),
    answers=(
        by_compare(0, "fprop", PLACE, "fprop.value"),
        by_check(0, "fprop", PLACE, "reduce.copies_summed"),
    ),
)
