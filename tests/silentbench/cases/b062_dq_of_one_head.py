"""The backward of attention gives dQ of one head wrong."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import attention


def one_head(grad):
    grad = grad.clone()
    grad[:, :, 1] *= 1.5
    return grad


def scaled(wrapped, instance, args, kwargs):
    query, *rest = args
    query = query.view_as(query)
    query.register_hook(one_head)
    return wrapped(query, *rest, **kwargs)


CASE = case(
    "B062",
    "https://github.com/NVIDIA/Megatron-LM/issues/1503",
    "https://github.com/NVIDIA/TransformerEngine/issues/1615",
    healthy=ONE,
    patches=(attention(scaled, "a kernel of Transformer Engine"),),
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
