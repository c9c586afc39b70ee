"""Weights through a checkpoint of Hugging Face's shape: ``weight_conversion.py VARIANT SCRIPT ARGS…``.

Hugging Face keeps ``q_proj k_proj v_proj``; Megatron keeps one ``linear_qkv`` whose rows are grouped by head:
q, k and v of head 0, then those of head 1. The model that the script builds is converted there and back.

- ``by-head``: right.
- ``in-blocks``: the three are put one under the other, as if Megatron kept all q, then all k, then all v.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from mindspeed_precision.testing.demo.defects.behind import run_behind


def to_hugging_face(qkv: torch.Tensor, heads: int) -> list[torch.Tensor]:
    """Return ``q k v`` ``[hidden, …]`` of Megatron's ``[3 hidden, …]``."""
    by_head = qkv.unflatten(0, (heads, 3, -1))
    return [by_head[:, part].flatten(0, 1) for part in range(3)]


def from_hugging_face(parts: list[torch.Tensor], heads: int, *, by_head: bool) -> torch.Tensor:
    """Return ``[3 hidden, …]`` of ``q k v``, in Megatron's order or in blocks."""
    if not by_head:
        return torch.cat(parts)
    return torch.stack([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 2)


def install(*, by_head: bool) -> None:
    """Convert the weights of every attention when it is built."""
    from megatron.core.transformer.attention import SelfAttention

    original = SelfAttention.__init__

    def built(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        heads = config.num_attention_heads
        with torch.no_grad():
            for parameter in self.linear_qkv.parameters():
                parts = to_hugging_face(parameter.data, heads)
                parameter.copy_(from_hugging_face(parts, heads, by_head=by_head))

    SelfAttention.__init__ = built


VARIANTS = {"by-head": partial(install, by_head=True), "in-blocks": partial(install, by_head=False)}

if __name__ == "__main__":
    run_behind(VARIANTS)
