"""Positions start again at the wrong place for the second packed sequence."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.layouts import ONE


def again(wrapped, instance, args, kwargs):
    tensor, freqs, *rest = args
    freqs = freqs.clone()
    freqs[16:] = freqs[:16].clone()
    return wrapped(tensor, freqs, *rest, **kwargs)


CASE = case(
    "B080",
    "https://github.com/NVIDIA/Megatron-LM/commit/d30e165203",
    "https://github.com/NVIDIA/Megatron-LM/pull/5243",
    healthy=ONE,
    patches=(
        plant(
            "megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_bshd",
            again,
            "(t, freqs, rotary_interleaved, multi_latent_attention, mscale)",
            "frequencies by the local position",
        ),
    ),
    answers=(
        by_compare(
            0, "fprop", "decoder.layers.0.self_attention.core_attention*", "fprop.value", roles="input"
        ),
        by_check(
            0,
            "fprop",
            "decoder.layers.0.self_attention.core_attention",
            "fprop.not_of_its_inputs",
            roles="input",
        ),
    ),
)
