"""The router's weights begin with another spread than the configuration says."""

from __future__ import annotations

from silentbench.answers import by_compare, by_verify
from silentbench.case import case
from silentbench.layouts import MIXTURE
from silentbench.plants import layer_built


def wider(wrapped, instance, args, kwargs):
    wrapped(*args, **kwargs)
    if instance.layer_number == 2:
        instance.mlp.router.weight.data *= 5


CASE = case(
    "B077",
    "https://github.com/NVIDIA/Megatron-LM/commit/1113758d24",
    "https://github.com/NVIDIA/Megatron-LM/commit/89ec6b164e",
    "https://github.com/NVIDIA/Megatron-LM/commit/08c377198b",
    "https://gitcode.com/Ascend/MindSpeed commit acb0f14d",
    "https://gitcode.com/Ascend/MindSpeed-Core-MS commit c6c700a",
    healthy=MIXTURE,
    patches=(layer_built(wider, "init_method was ignored"),),
    answers=(
        by_compare(-1, "init", "decoder.layers.1.mlp.router.weight", "weights.initial_differs"),
        by_verify("weights.scaled weights.other_spread", "decoder.layers.1.mlp.router.weight"),
    ),
)
