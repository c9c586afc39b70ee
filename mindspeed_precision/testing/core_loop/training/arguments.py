"""Megatron's command line, as far as this loop reads it, and what it refuses."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from mindspeed_precision.errors import ConfigError
from mindspeed_precision.testing.core_loop.weights import leave_uninitialised

_REQUIRED = {
    "num-layers": int,
    "hidden-size": int,
    "num-attention-heads": int,
    "seq-length": int,
    "max-position-embeddings": int,
    "micro-batch-size": int,
    "vocab-size": int,
    "train-iters": int,
    "lr": float,
}
_OPTIONAL: dict[str, Any] = {
    "ffn-hidden-size": None,
    "num-query-groups": 1,
    "global-batch-size": None,
    "make-vocab-size-divisible-by": 128,
    "tensor-model-parallel-size": 1,
    "pipeline-model-parallel-size": 1,
    "context-parallel-size": 1,
    "expert-model-parallel-size": 1,
    "hidden-dropout": 0.1,
    "attention-dropout": 0.1,
    "norm-epsilon": 1e-5,
    "rotary-base": 10000,
    "rotary-percent": 1.0,
    "min-lr": 0.0,
    "lr-decay-iters": None,
    "lr-warmup-iters": 0,
    "lr-warmup-init": 0.0,
    "weight-decay": 0.01,
    "adam-beta1": 0.9,
    "adam-beta2": 0.999,
    "adam-eps": 1e-8,
    "clip-grad": 1.0,
    "seed": 1234,
    "eval-iters": 100,
    "eval-interval": 1000,
    "log-interval": 100,
    "num-workers": 2,
}
_INTEGERS = ("ffn-hidden-size", "global-batch-size", "lr-decay-iters")
_CHOICES = {
    "transformer-impl": ("local",),
    "distributed-backend": ("gloo", "nccl", "mccl"),
    "tokenizer-type": ("NullTokenizer",),
    "position-embedding-type": ("learned_absolute", "rope", "none"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "lr-decay-style": ("linear", "constant", "cosine"),
}
_SWITCHES = (
    *("swiglu", "squared-relu", "group-query-attention", "untie-embeddings-and-output-weights"),
    *("apply-layernorm-1p", "add-qkv-bias", "qk-layernorm", "deterministic-mode"),
    "apply-query-key-layer-scaling",
)
_SWITCHED_OFF = {
    "no-persist-layer-norm": "persist_layer_norm",
    "no-gradient-accumulation-fusion": "gradient_accumulation_fusion",
    "no-masked-softmax-fusion": "masked_softmax_fusion",
    "no-bias-gelu-fusion": "bias_gelu_fusion",
    "no-bias-swiglu-fusion": "bias_swiglu_fusion",
    "no-bias-dropout-fusion": "bias_dropout_fusion",
    "no-rope-fusion": "apply_rope_fusion",
    "disable-bias-linear": "add_bias_linear",
}
_REFUSED_SWITCHES = (
    *("fp16", "bf16", "sequence-parallel", "use-distributed-optimizer", "overlap-grad-reduce"),
    *("overlap-param-gather", "calculate-per-token-loss", "fp8-format"),
)
_REFUSED_SIZES = ("pipeline-model-parallel-size", "context-parallel-size", "expert-model-parallel-size")

ExtraArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def _attribute(flag: str) -> str:
    return flag.replace("-", "_")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Megatron arguments of the core loop", allow_abbrev=False)
    for flag, kind in _REQUIRED.items():
        parser.add_argument(f"--{flag}", type=kind, required=True)
    for flag, default in _OPTIONAL.items():
        parser.add_argument(
            f"--{flag}", type=int if flag in _INTEGERS or isinstance(default, int) else float, default=default
        )
    for flag, choices in _CHOICES.items():
        parser.add_argument(f"--{flag}", choices=choices, default=choices[0])
    for flag in (*_SWITCHES, *_REFUSED_SWITCHES):
        parser.add_argument(f"--{flag}", action="store_true")
    for flag, attribute in _SWITCHED_OFF.items():
        parser.add_argument(f"--{flag}", action="store_false", dest=attribute)
    parser.add_argument("--num-experts", type=int, default=None)
    parser.add_argument("--split", default="100,0,0", help="read by the script's datasets, not by the loop")
    parser.add_argument("--load-weights", type=Path, help="safetensors file of unsharded initial weights")
    parser.add_argument("--save-weights", type=Path, help="write the initial weights there")
    return parser


def parse_args(
    extra_args_provider: ExtraArguments | None = None, ignore_unknown_args: bool = False
) -> argparse.Namespace:
    """Return the command line of this process; Megatron's signature.

    Args:
        extra_args_provider: adds arguments to the parser and returns it.
        ignore_unknown_args: leave out what the parser does not know instead of refusing it.
    """
    parser = _parser()
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    args = parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()
    args.world_size = int(os.environ.get("WORLD_SIZE") or os.environ.get("RANK_SIZE") or 1)
    args.rank = int(os.environ.get("RANK") or os.environ.get("RANK_ID") or 0)
    return args


def validate_args(
    args: argparse.Namespace, args_defaults: dict[str, Any] | None = None
) -> argparse.Namespace:
    """Fill in what follows from other arguments, and refuse what the loop cannot do.

    Args:
        args: from ``parse_args``; changed.
        args_defaults: values for arguments that are None.

    Raises:
        ConfigError: an argument asks for what this loop does not have; all of them are named.
    """
    for name, value in (args_defaults or {}).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    _refuse(args)
    args.data_parallel_size, left = divmod(args.world_size, args.tensor_model_parallel_size)
    if left:
        raise ConfigError(
            "the processes do not divide into tensor-parallel groups",
            where="--tensor-model-parallel-size",
            found=f"{args.world_size} processes",
            expected=f"a multiple of {args.tensor_model_parallel_size}",
        )
    args.global_batch_size = args.global_batch_size or args.micro_batch_size * args.data_parallel_size
    args.ffn_hidden_size = args.ffn_hidden_size or 4 * args.hidden_size
    args.lr_decay_iters = args.lr_decay_iters or args.train_iters
    args.padded_vocab_size = _padded_vocabulary(args)
    args.params_dtype = torch.float32
    args.iteration = args.curr_iteration = args.consumed_train_samples = 0
    args.virtual_pipeline_model_parallel_size = None
    return args


def _refuse(args: argparse.Namespace) -> None:
    refused = [f"--{flag}" for flag in _REFUSED_SWITCHES if getattr(args, _attribute(flag))]
    refused += [f"--{flag} > 1" for flag in _REFUSED_SIZES if getattr(args, _attribute(flag)) > 1]
    refused += ["--num-experts"] if args.num_experts else []
    if refused:
        raise ConfigError(
            "the core loop cannot do this",
            where="megatron.training (mindspeed_precision.testing.core_loop)",
            found=", ".join(refused),
            remedy="use a Megatron-LM checkout or megatron-core >= 0.17, which have a loop of their own",
        )


def _padded_vocabulary(args: argparse.Namespace) -> int:
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    tokens = args.vocab_size + 1  # NullTokenizer's end of document
    return int(-(-tokens // multiple) * multiple)


def core_transformer_config_from_args(args: argparse.Namespace, config_class: Any = None) -> Any:
    """Return megatron-core's configuration for ``args``.

    Weights are left uninitialised by the model: the loop sets them afterwards, from numpy or from a file.

    Args:
        args: validated.
        config_class: instead of ``TransformerConfig``.
    """
    config_class = config_class or TransformerConfig
    values = {
        field.name: getattr(args, field.name)
        for field in dataclasses.fields(config_class)
        if hasattr(args, field.name)
    }
    values.update(
        layernorm_zero_centered_gamma=args.apply_layernorm_1p,
        layernorm_epsilon=args.norm_epsilon,
        pipeline_dtype=args.params_dtype,
        bias_activation_fusion=args.bias_swiglu_fusion if args.swiglu else args.bias_gelu_fusion,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        init_method=leave_uninitialised,
        output_layer_init_method=leave_uninitialised,
    )
    if args.swiglu:
        values.update(activation_func=torch.nn.functional.silu, gated_linear_unit=True)
    return config_class(**values)
