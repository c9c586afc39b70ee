"""Model, optimizer and schedule of a ``CpuTrainer``, as ``megatron.training`` would build them."""

from __future__ import annotations

import dataclasses
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from mindspeed_precision.errors import ConfigError
from mindspeed_precision.testing.byte_text import BYTE_VALUES
from mindspeed_precision.testing.generations import virtual_stage

if TYPE_CHECKING:
    from mindspeed_precision.testing.trainer import TrainerSettings

BUCKET_ELEMENTS = 10_000  # small, so that an overlapped reduction has several buckets
INITIAL_LOSS_SCALE = 1024.0


def transformer_config(settings: TrainerSettings) -> Any:
    """Return Megatron's configuration of the model, without the fusions that a CPU has no kernels for."""
    fields: dict[str, Any] = dict(
        num_layers=settings.layers,
        hidden_size=settings.hidden,
        ffn_hidden_size=4 * settings.hidden,
        num_attention_heads=settings.heads,
        num_query_groups=settings.kv_groups or settings.heads,
        normalization="RMSNorm" if settings.rmsnorm else "LayerNorm",
        gated_linear_unit=settings.swiglu,
        activation_func=torch.nn.functional.silu if settings.swiglu else torch.nn.functional.gelu,
        add_bias_linear=not (settings.swiglu or settings.experts),
        hidden_dropout=settings.dropout,
        attention_dropout=settings.dropout,
        gradient_accumulation_fusion=settings.gradient_accumulation_fusion,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        **_precision(settings),
        **_parallelism(settings),
        **_mixture(settings),
        **_recomputation(settings),
    )
    return TransformerConfig(**{**fields, **settings.transformer})


def _precision(settings: TrainerSettings) -> dict[str, Any]:
    dtype = settings.torch_dtype
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": settings.dtype == "bf16",
        "fp16": settings.dtype == "fp16",
    }


def _parallelism(settings: TrainerSettings) -> dict[str, Any]:
    interleaved = settings.vpp > 1
    return {
        "tensor_model_parallel_size": settings.tp,
        "pipeline_model_parallel_size": settings.pp,
        "virtual_pipeline_model_parallel_size": settings.vpp if interleaved else None,
        "context_parallel_size": settings.cp,
        "expert_model_parallel_size": settings.ep,
        "expert_tensor_parallel_size": settings.etp,
        "sequence_parallel": settings.sequence_parallel,
        # with two stages the interleaved schedule is wrong unless p2p communication is overlapped
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "deallocate_pipeline_outputs": True,
    }


def _mixture(settings: TrainerSettings) -> dict[str, Any]:
    if not settings.experts:
        return {}
    return {
        "num_moe_experts": settings.experts,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
    }


def _recomputation(settings: TrainerSettings) -> dict[str, Any]:
    if not settings.recompute:
        return {}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def build_model(config: Any, settings: TrainerSettings) -> list[Any]:
    """Return this rank's model chunks in DistributedDataParallel.

    Raises:
        ConfigError: a pattern of ``settings.frozen`` matches no parameter.
    """
    chunks = [_build_chunk(config, settings, number) for number in range(settings.vpp)]
    _freeze(chunks, settings)
    if settings.dtype != "fp32":
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    fields: dict[str, Any] = {
        "grad_reduce_in_fp32": settings.dtype != "fp32",
        "overlap_grad_reduce": settings.overlap,
        "overlap_param_gather": settings.overlap and settings.distributed_optimizer,
        "use_distributed_optimizer": settings.distributed_optimizer,
        "check_for_nan_in_grad": settings.dtype != "fp16",  # fp16 skips the step instead
        "bucket_size": BUCKET_ELEMENTS if settings.overlap else None,
    }
    ddp = DistributedDataParallelConfig(**{**fields, **settings.ddp})
    return [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


def _build_chunk(config: Any, settings: TrainerSettings, number: int) -> Any:
    stage = virtual_stage(number if settings.vpp > 1 else None)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    if settings.experts:
        layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False, **stage)
    else:
        layers = get_gpt_layer_local_spec(normalization=config.normalization)
    model = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=BYTE_VALUES + settings.padding,
        max_sequence_length=settings.seq_length,
        pre_process=rank == 0 and number == 0,
        post_process=rank == settings.pp - 1 and number == settings.vpp - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=not settings.untie,
        position_embedding_type="rope",
        **stage,
    )
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return model


def _freeze(chunks: list[Any], settings: TrainerSettings) -> None:
    named = [item for chunk in chunks for item in chunk.named_parameters()]
    for pattern in settings.frozen:
        matched = [parameter for name, parameter in named if fnmatchcase(name, pattern)]
        if not matched and settings.pp == 1:  # another pipeline stage may have it
            names = ", ".join(name for name, _ in named)
            raise ConfigError("matches no parameter", where=f"frozen: {pattern}", found=names)
        for parameter in matched:
            parameter.requires_grad = False


def build_optimizer(model: list[Any], settings: TrainerSettings) -> Any:
    """Return Megatron's Adam over the model chunks."""
    fields: dict[str, Any] = dict(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.lr,
        weight_decay=settings.weight_decay,
        adam_eps=settings.adam_eps,
        clip_grad=settings.clip,
        params_dtype=settings.torch_dtype,
        bf16=settings.dtype == "bf16",
        fp16=settings.dtype == "fp16",
        initial_loss_scale=INITIAL_LOSS_SCALE,
        use_distributed_optimizer=settings.distributed_optimizer,
        **_known_fields(overlap_param_gather=settings.overlap and settings.distributed_optimizer),
    )
    config = OptimizerConfig(**{**fields, **settings.optimizer})
    return get_megatron_optimizer(config, model, use_gloo_process_groups=False)


def _known_fields(**wanted: Any) -> dict[str, Any]:
    # 0.12 leaves the overlap to DistributedDataParallel
    known = {field.name for field in dataclasses.fields(OptimizerConfig)}
    return {name: value for name, value in wanted.items() if name in known}


def build_scheduler(optimizer: Any, settings: TrainerSettings) -> Any:
    """Return a schedule that keeps learning rate and weight decay, stepped as in Megatron's loop."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.lr,
        lr_warmup_steps=0,
        lr_decay_steps=1,
        lr_decay_style="constant",
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def connect(config: Any, model: list[Any], optimizer: Any, settings: TrainerSettings) -> None:
    """Tell the schedule (``config``) what it calls during a step."""
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if settings.overlap:
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in model])
        if settings.distributed_optimizer:
            config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in model])


def _one_or_all(functions: list[Any]) -> Any:
    return functions if len(functions) > 1 else functions[0]
