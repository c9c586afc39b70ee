"""An all-reduce in place changes the router's local counts, which are read afterwards as local ones.

No line of Megatron is changed; the twin reduces a copy. Only with a padding mask and a loss per token.
"""

from __future__ import annotations

from silentbench.answers import by_compare
from silentbench.case import case, plant
from silentbench.layouts import MIXTURE


def padded(wrapped, instance, args, kwargs):
    import torch

    mask = torch.zeros_like(args[0], dtype=torch.bool)
    mask[:, 24:] = True  # padding, as the router reads it: its docstring says the opposite
    return wrapped(*args, **{**kwargs, "padding_mask": mask})


def of_a_copy(wrapped, instance, args, kwargs):
    return wrapped(args[0].clone(), *args[1:], **kwargs)


PADDED = plant(
    "megatron.core.models.gpt.gpt_model:GPTModel.forward",
    padded,
    "(self, input_ids, position_ids, attention_mask, decoder_input, labels, inference_context, "
    "packed_seq_params, extra_block_kwargs, runtime_gather_output, *, inference_params, loss_mask, "
    "padding_mask)",
    "the last quarter of each sample is padding",
)
COPY = plant(
    "megatron.core.tensor_parallel.mappings:reduce_from_tensor_model_parallel_region",
    of_a_copy,
    "(input_, group)",
    "the counts keep what they are",
)
SETTINGS = {
    "tp": 2,
    "sequence_parallel": True,
    "transformer": {"moe_aux_loss_coeff": 1.0, "calculate_per_token_loss": True},
}

CASE = case(
    "B050",
    "https://github.com/NVIDIA/Megatron-LM/issues/7452",
    "https://github.com/NVIDIA/Megatron-LM/pull/7481",
    healthy=MIXTURE.but(world=2, settings=SETTINGS, patches=(PADDED, COPY)),
    faulty=MIXTURE.but(world=2, settings=SETTINGS, patches=(PADDED,)),
    answers=(
        by_compare(
            0,
            "dgrad wgrad",
            "decoder.layers.1.mlp.router*",
            "wgrad.value wgrad.after_gemm wgrad.operand_value wgrad.own_fault wgrad.scaled "
            "dgrad.value dgrad.scaled",
        ),
    ),
)
