"""The backward of attention scales dK of the second half of the sequence."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import attention


def half(grad):
    grad = grad.clone()
    grad[grad.shape[0] // 2 :] *= 2
    return grad


def scaled(wrapped, instance, args, kwargs):
    query, key, *rest = args
    key = key.view_as(key)
    key.register_hook(half)
    return wrapped(query, key, *rest, **kwargs)


CASE = case(
    "B061",
    "https://github.com/NVIDIA/Megatron-LM/issues/1464",
    "https://github.com/NVIDIA/Megatron-LM/issues/1465",
    "https://github.com/NVIDIA/TransformerEngine/issues/1557",
    "TTrace new bug (arXiv 2506.09280)",
    healthy=ONE,
    patches=(attention(scaled, "dK of a context-parallel attention"),),
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
