"""What differs between the generations of Megatron that the script runs on: 0.12 to 0.17, 0.18, 0.19."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron import core
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import arguments

VERSION = tuple(int(part) for part in core.__version__.split("rc")[0].split(".")[:2])


def transformer_config(args: Any) -> Any:
    """Return Megatron's TransformerConfig for ``args``; the function moved in 0.18."""
    if hasattr(arguments, "core_transformer_config_from_args"):
        return arguments.core_transformer_config_from_args(args)
    from megatron.training.argument_utils import core_transformer_config_from_args

    return core_transformer_config_from_args(args)


def virtual_stage(vp_stage: int | None) -> dict[str, int | None]:
    """Return the keyword that tells a model which virtual stage it is, where the version knows it."""
    return {"vp_stage": vp_stage} if "vp_stage" in inspect.signature(GPTModel.__init__).parameters else {}


def slice_for_context_parallelism(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the part of the sequence in ``batch`` that belongs to this context-parallel rank."""
    hybrid = "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters
    return dict(
        get_batch_on_this_cp_rank(batch, is_hybrid_cp=False) if hybrid else get_batch_on_this_cp_rank(batch)
    )


def loss_report(loss: Any, tokens: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return what a loss function gives back: the loss summed over tokens, their count, what is logged.

    Until 0.12 the script reduces the report itself, and the loss over the context-parallel group.
    """
    both = torch.stack([loss, tokens])
    if VERSION < (0, 13):
        if mpu.get_context_parallel_world_size() > 1:
            torch.distributed.all_reduce(both, group=mpu.get_context_parallel_group())
        report = both.detach().clone()
        torch.distributed.all_reduce(report, group=mpu.get_data_parallel_group())
        return both[0].clone(), both[1].detach().clone().to(torch.int), {"lm loss": (report[0], report[1])}
    return loss, tokens.detach().clone().to(torch.int), {"lm loss": both.detach().clone()}


def call_pretrain(
    pretrain: Callable[..., Any],
    *,
    datasets_provider: Callable[..., Any],
    model_provider: Callable[..., Any],
    forward_step: Callable[..., Any],
    args_defaults: dict[str, Any],
) -> None:
    """Call ``pretrain`` as a script for the installed generation would."""
    model_type = ModelType.encoder_or_decoder
    if VERSION < (0, 18):
        pretrain(datasets_provider, model_provider, model_type, forward_step, args_defaults=args_defaults)
        return
    from megatron.training import argument_utils

    args = arguments.parse_and_validate_args(args_defaults=args_defaults)
    if VERSION < (0, 19):
        configuration = argument_utils.pretrain_cfg_container_from_args(args)
        pretrain(configuration, datasets_provider, model_provider, model_type, forward_step)
        return
    model = argument_utils.gpt_config_from_args(args)
    configuration = argument_utils.pretrain_cfg_container_from_args(args, model)
    pretrain(configuration, datasets_provider, model_type, forward_step, model_provider=model_provider)
