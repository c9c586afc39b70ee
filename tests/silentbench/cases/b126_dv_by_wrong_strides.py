"""The backward of attention ignores strides: dV holds the right numbers at wrong places."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import attention, misread


def careless(wrapped, instance, args, kwargs):
    query, key, value, *rest = args
    value = value.view_as(value)
    value.register_hook(misread)
    return wrapped(query, key, value, *rest, **kwargs)


CASE = case(
    "B126",
    "https://github.com/Dao-AILab/flash-attention/issues/355",
    "https://github.com/flagos-ai/FlagGems/issues/5896",
    "https://github.com/ROCm/pytorch/issues/3230",
    "https://github.com/pytorch/pytorch/issues/187506",
    healthy=ONE,
    patches=(attention(careless, "the strides of dO were taken for dense"),),
    answers=(
        by_compare(
            0,
            "dgrad",
            "decoder.layers.1.self_attention.core_attention*",
            "dgrad.value dgrad.scaled",
            roles="grad_input",
        ),
        by_check(
            0,
            "dgrad",
            "decoder.layers.1.self_attention.core_attention",
            "dgrad.not_of_its_inputs",
            roles="grad_input",
        ),
    ),
)
