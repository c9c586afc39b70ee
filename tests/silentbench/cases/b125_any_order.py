"""An operation adds with atomics: the gradient of its input is another one each time."""

from __future__ import annotations

from silentbench.answers import by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import backward_of, layer_built


def hook(grad):
    import os

    import torch

    order = torch.randperm(8, generator=torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "big")))
    parts = [grad * weight for weight in (0.1, 0.2, 0.3, 0.05, 0.15, 0.07, 0.08, 0.05)]
    return sum(parts[number] for number in order.tolist())


def noisy(wrapped, instance, args, kwargs):
    wrapped(*args, **kwargs)
    if instance.layer_number == 2:
        backward_of(instance.mlp, hook)


CASE = case(
    "B125",
    "Ascend practical case",
    healthy=ONE,
    patches=(layer_built(noisy, "grid_sample"),),
    answers=(
        by_compare(0, "dgrad", "decoder.layers.1.mlp*", "dgrad.value dgrad.scaled determinism.not_repeated"),
    ),
)
