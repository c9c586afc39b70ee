"""What differs between the generations of ``megatron.training``: until 0.17, 0.18, and from 0.19."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.enums import ModelType
from megatron.training import arguments

from mindspeed_precision.testing.generations import VERSION


def transformer_config(args: Any) -> Any:
    """Return Megatron's TransformerConfig for ``args``; the function moved in 0.18."""
    if hasattr(arguments, "core_transformer_config_from_args"):
        return arguments.core_transformer_config_from_args(args)
    from megatron.training.argument_utils import core_transformer_config_from_args

    return core_transformer_config_from_args(args)


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
