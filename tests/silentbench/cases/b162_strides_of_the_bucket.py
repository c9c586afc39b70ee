"""A gradient's strides differ from those of its view of the bucket: it is added as if it were dense."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import layer_built, misread


def careless(wrapped, instance, args, kwargs):
    wrapped(*args, **kwargs)
    instance.self_attention.linear_proj.weight.register_hook(misread)


CASE = case(
    "B162",
    "https://github.com/Ascend/pytorch/issues/17",
    healthy=ONE,
    patches=(layer_built(careless, "the layout of bucket views"),),
    answers=(
        by_compare(
            0,
            "wgrad accumulate",
            "decoder.layers.1.self_attention.linear_proj.weight",
            "wgrad.accumulation layout.noncontiguous_accumulate layout.noncontiguous_grad",
        ),
        by_check(
            0,
            "wgrad accumulate",
            "decoder.layers.*.self_attention.linear_proj.weight",
            "wgrad.not_the_product wgrad.changed_on_the_way",
        ),
    ),
)
