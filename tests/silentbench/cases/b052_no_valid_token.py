"""Multi-token prediction divides by the number of valid tokens, which is zero in one microbatch: NaN.

No line of Megatron is changed.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.layouts import ONE
from silentbench.plants import model_built

CALLS = [0]


def with_mtp(wrapped, instance, args, kwargs):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    CALLS[0] = 0
    config, spec = kwargs["config"], kwargs["transformer_layer_spec"]
    block = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    wrapped(*args, **{**kwargs, "mtp_block_spec": block})


def none_valid(wrapped, instance, args, kwargs):
    import torch

    CALLS[0] += 1
    mask = torch.ones_like(args[0]) * (CALLS[0] != 2)  # the second microbatch of the first step
    return wrapped(*args, **{**kwargs, "loss_mask": mask})


MTP = ONE.but(
    settings={"transformer": {"mtp_num_layers": 1}, "ddp": {"check_for_nan_in_grad": False}},
    patches=(model_built(with_mtp, "one layer of multi-token prediction"),),
)

CASE = case(
    "B052",
    "https://github.com/NVIDIA/Megatron-LM/pull/3396",
    "https://github.com/NVIDIA/Megatron-LM/commit/d7500d4d2a",
    healthy=MTP,
    patches=(
        plant(
            "megatron.core.models.gpt.gpt_model:GPTModel.forward",
            none_valid,
            "(self, input_ids, position_ids, attention_mask, decoder_input, labels, inference_context, "
            "packed_seq_params, extra_block_kwargs, runtime_gather_output, *, inference_params, loss_mask, "
            "padding_mask)",
            "the data: a microbatch without a valid token",
        ),
    ),
    answers=(
        by_compare(0, "dgrad", "output_layer mtp*", "nonfinite.first"),
        by_check(0, "dgrad", "output_layer mtp*", "nonfinite.first"),
    ),
)
