"""SwiGLU splits its input along the wrong dimension."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import mlp_forward


def along_the_first(wrapped, instance, args, kwargs):
    from unittest.mock import patch

    import torch

    def chunk(tensor, parts, dim=0):  # [s, b, 2 h]: halves of s, laid out as halves of the last dimension
        return tuple(part.reshape(*tensor.shape[:-1], -1) for part in torch.tensor_split(tensor, parts, 0))

    with patch("torch.chunk", chunk):
        return wrapped(*args, **kwargs)


CASE = case(
    "B111",
    "https://gitcode.com/Ascend/MindSpeed-LLM commit 2a545dd5",
    healthy=ONE.but(settings={"swiglu": True, "transformer": {"bias_activation_fusion": False}}),
    patches=(mlp_forward(along_the_first, "chunk without dim=-1"),),
    answers=(
        by_compare(0, "fprop", "decoder.layers.0.mlp decoder.layers.0.mlp.linear_fc2", "fprop.value"),
        by_check(0, "fprop", "decoder.layers.0.mlp.linear_fc2", "fprop.not_of_its_inputs", roles="input"),
    ),
)
