"""Latent attention under tensor parallelism: the rotary key's gradient is that of the rank's own heads.

``linear_kv_down_proj`` is column-parallel; its output is gathered and used by all heads, and nothing sums
what comes back. No line of Megatron is changed.
"""

from __future__ import annotations

from silentbench.answers import by_compare
from silentbench.case import case, plant
from silentbench.cases.b054_sharded_norm_not_reduced import SPEC
from silentbench.layouts import ONE, TP

LATENT = {
    "transformer": {
        "multi_latent_attention": True,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 8,
        "rope_type": "rope",
    }
}


def latent_config(wrapped, instance, args, kwargs):
    from unittest.mock import patch

    from megatron.core.transformer import MLATransformerConfig

    with patch("mindspeed_precision.testing.model_building.TransformerConfig", MLATransformerConfig):
        return wrapped(*args, **kwargs)


def latent_spec(wrapped, instance, args, kwargs):
    import torch

    class Attention(torch.nn.Module):
        """Of heads whose keys and values differ in size, which Megatron's own attention refuses."""

        def __init__(self, config, softmax_scale=None, **_):
            super().__init__()
            self.scale = softmax_scale

        def forward(self, query, key, value, attention_mask, **_):
            scores = torch.einsum("sbnd,tbnd->bnst", query, key) * self.scale
            probs = scores.masked_fill(attention_mask, -10_000.0).softmax(-1)
            return torch.einsum("bnst,tbnd->sbnd", probs, value).flatten(2)

    from megatron.core.transformer import multi_latent_attention

    if not isinstance(multi_latent_attention.TELinear, type):  # it is asked for, and is None without it
        multi_latent_attention.TELinear = type("TELinear", (), {})
    spec = wrapped(*args, **{**kwargs, "multi_latent_attention": True})
    spec.submodules.self_attention.submodules.core_attention = Attention
    return spec


MODEL = (
    plant(
        "mindspeed_precision.testing.model_building:transformer_config", latent_config, "(settings)", "MLA"
    ),
    plant(SPEC.target, latent_spec, SPEC.signatures, "MLA, with an attention of its own"),
)

PLACE = "decoder.layers.1.self_attention*"
CASE = case(
    "B004",
    "https://github.com/NVIDIA/Megatron-LM/issues/1699",
    "https://github.com/NVIDIA/TransformerEngine/issues/1975",
    "https://github.com/NVIDIA/Megatron-LM/pull/6839",
    healthy=ONE.but(settings=LATENT, patches=MODEL),
    faulty=TP.but(settings=LATENT, patches=MODEL),
    reference=ONE.but(settings=LATENT, patches=MODEL, repeat=1),
    answers=(by_compare(0, "dgrad wgrad", PLACE, "dgrad.value parallel.replicas_differ"),),
)
