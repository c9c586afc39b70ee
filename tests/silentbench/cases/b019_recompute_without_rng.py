"""Recomputation draws a new dropout mask: the generator's state is not brought back."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.layouts import ONE


def nothing(wrapped, instance, args, kwargs):
    return None


CASE = case(
    "B019",
    "https://github.com/allenai/OLMo-core/pull/828",
    "https://github.com/pytorch/pytorch/issues/190758",
    healthy=ONE.but(settings={"recompute": True, "dropout": 0.1}),
    patches=(
        plant(
            "megatron.core.tensor_parallel.random:_set_all_rng_states",
            nothing,
            "(cpu_rng_state, cuda_rng_state, cuda_rng_state_tracker)",
            "the backward did not restore the generators",
        ),
    ),
    answers=(
        by_compare(0, "fprop", "decoder.layers.1*", "fprop.recomputed_differs"),
        by_check(0, "fprop", "decoder.layers.1*", "fprop.recomputed_differs"),
    ),
)
