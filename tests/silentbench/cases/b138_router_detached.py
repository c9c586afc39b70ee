"""The router gets no gradient from the experts: its probabilities are detached."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.layouts import MIXTURE


def detached(wrapped, instance, args, kwargs):
    probs, routes = wrapped(*args, **kwargs)
    return probs.detach(), routes


CASE = case(
    "B138",
    "https://github.com/huggingface/transformers/issues/48687",
    healthy=MIXTURE,
    patches=(
        plant(
            "megatron.core.transformer.moe.router:TopKRouter.forward",
            detached,
            "(self, input, padding_mask)",
            "the batched product did not propagate it",
        ),
    ),
    answers=(
        by_compare(
            0,
            "dgrad wgrad accumulate reduce",
            "decoder.layers.1.mlp.router*",
            "dgrad.missing wgrad.missing symptom.zero_gradient",
        ),
        by_check(
            0,
            "dgrad wgrad accumulate reduce optimizer",
            "decoder.layers.*.mlp.router*",
            "wgrad.missing symptom.zero_gradient",
        ),
    ),
)
