"""Pretrain a small GPT with Megatron on the bytes of a text: a user's script, with one import swapped."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.tensor_parallel import broadcast_data
from megatron.training import get_args

from mindspeed_precision import pretrain  # was: from megatron.training import pretrain
from mindspeed_precision.testing.byte_text import ByteWindows
from mindspeed_precision.testing.demo.pretrain_call import call_pretrain, transformer_config
from mindspeed_precision.testing.generations import loss_report, slice_for_context_parallelism, virtual_stage

INTEGER_KEYS = ["tokens", "labels", "position_ids"]


def model_provider(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **_: Any
) -> GPTModel:
    """Build this rank's part of the model."""
    args = get_args()
    config = transformer_config(args)
    stage = virtual_stage(vp_stage)
    if args.num_experts:
        layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False, **stage)
    else:
        layers = get_gpt_layer_local_spec(normalization=args.normalization)
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        **stage,
    )


def get_batch(data_iterator: Any) -> dict[str, Any]:
    """Return this rank's batch: ``[b, s]`` each; the first tensor-parallel rank reads and tells."""
    data = next(data_iterator) if mpu.get_tensor_model_parallel_rank() == 0 else None
    batch = broadcast_data(INTEGER_KEYS, data, torch.int64) | broadcast_data(
        ["loss_mask"], data, torch.float32
    )
    return slice_for_context_parallelism(batch)


def loss_func(loss_mask: Any, output_tensor: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Sum the loss of the tokens that count."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * mask)
    return loss_report(loss, mask.sum())


def forward_step(data_iterator: Any, model: Any) -> tuple[Any, Any]:
    """Run one microbatch forward."""
    inside = not (
        mpu.is_pipeline_first_stage(ignore_virtual=True) or mpu.is_pipeline_last_stage(ignore_virtual=True)
    )
    batch = dict.fromkeys([*INTEGER_KEYS, "loss_mask"]) if inside else get_batch(data_iterator)
    length = get_args().seq_length
    attention_mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    output = model(batch["tokens"], batch["position_ids"], attention_mask, labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


def train_valid_test_datasets_provider(num_samples: Any, vp_stage: int | None = None) -> tuple[Any, ...]:
    """Return the sets to train on, to evaluate on and to test on; None where no sample is asked for."""
    args = get_args()
    return tuple(
        ByteWindows(seq_length=args.seq_length, samples=number, seed=args.seed + offset) if number else None
        for offset, number in enumerate(num_samples)
    )


if __name__ == "__main__":
    call_pretrain(
        pretrain,
        datasets_provider=train_valid_test_datasets_provider,
        model_provider=model_provider,
        forward_step=forward_step,
        args_defaults={"tokenizer_type": "NullTokenizer"},
    )
