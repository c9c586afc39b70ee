"""What is imported as ``megatron.training`` where megatron-core ships none; see `testing.core_loop`."""

from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args
from megatron.training.global_vars import get_args, get_timers
from megatron.training.training import pretrain, setup_model_and_optimizer, train, train_step

__all__ = [
    "core_transformer_config_from_args",
    "get_args",
    "get_timers",
    "parse_args",
    "pretrain",
    "setup_model_and_optimizer",
    "train",
    "train_step",
    "validate_args",
]
