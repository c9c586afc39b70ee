"""Dropout stays off after an evaluation: here from the second step on."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import training_step


def off(wrapped, instance, args, kwargs):
    if instance.step == 1:
        for module in instance.model[0].modules():
            if hasattr(module, "p"):
                module.p = 0.0
            if hasattr(module, "hidden_dropout"):
                module.hidden_dropout = 0.0
    return wrapped(*args, **kwargs)


CASE = case(
    "B082",
    "https://github.com/NVIDIA/Megatron-LM/commit/7cc8d839e4",
    "TrainCheck transformers-17877/33844 (dropout in eval)",
    healthy=ONE.but(settings={"dropout": 0.1}),
    patches=(training_step(off, "evaluation set the probability itself to zero"),),
    answers=(
        by_compare(1, "fprop", "embedding* decoder.layers.0.self_attention*", "fprop.value"),
        by_check(1, "fprop", "embedding.embedding_dropout", "rng.dropout_stopped"),
    ),
)
