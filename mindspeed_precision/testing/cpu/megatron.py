"""Pieces inside Megatron, each applied right after the module that it concerns has been imported."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from types import ModuleType
from typing import Any

from mindspeed_precision.testing.cpu.context_parallel import attend_over_context_parallel_group
from mindspeed_precision.testing.piece import Piece, after_import


def _load_no_fused_kernels(module: ModuleType) -> None:
    def load(args: Any) -> None:
        """Build nothing: the kernels are CUDA."""

    module.load = load  # type: ignore[attr-defined]


def _take_prebuilt_helpers(module: Any) -> None:
    original = module.compile_helpers
    folder = Path(module.__file__).parent

    @functools.wraps(original)
    def compile_helpers() -> None:
        if not any(folder.glob("helpers_cpp*.so")):
            original()

    module.compile_helpers = compile_helpers


def _quantize_only_what_is_there(module: Any) -> None:
    original = module.quantize_param_shard

    @functools.wraps(original)
    def quantize_param_shard(model_params: Any, *args: Any, **kwargs: Any) -> Any:
        return original(model_params, *args, **kwargs) if len(model_params) else None

    module.quantize_param_shard = quantize_param_shard


def _mark_norms_for_sequence_parallelism(module: Any) -> None:
    norm_class = module.WrappedTorchNorm
    original = norm_class.__new__

    @functools.wraps(original)
    def create(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = plain.persist_layer_norm = False
        norm = original(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    norm_class.__new__ = staticmethod(create)


def _name_the_missing_gemm(module: Any) -> None:
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None


PIECES = (
    Piece(
        name="fused_kernels",
        why="The legacy tree builds CUDA kernels when it starts.",
        error_without="TypeError: unsupported operand type(s) for +: 'NoneType' and 'str' (CUDA_HOME)",
        when="a checkout with megatron.legacy",
        versions="<0.16",
        apply=after_import("megatron.legacy.fused_kernels", _load_no_fused_kernels),
    ),
    Piece(
        name="prebuilt_helpers",
        why="compile_helpers runs make beside helpers.cpp; wheels ship the built library and no Makefile.",
        error_without="SystemExit: Failed to compile the C++ dataset helper functions",
        when="megatron.training from a wheel",
        apply=after_import("megatron.core.datasets.utils", _take_prebuilt_helpers),
    ),
    Piece(
        name="no_fp8_shards",
        why="Without Transformer Engine the distributed optimizer refuses to quantise even an empty list "
        "of fp8 shards.",
        error_without="Invalid Transformer Engine version for FP8 distributed optimizer",
        when="distributed optimizer, DP > 1",
        versions="<0.16",
        apply=after_import("megatron.core.fp8_utils", _quantize_only_what_is_there),
    ),
    Piece(
        name="sequence_parallel_norm",
        why="torch's norms are refused under sequence parallelism only because nobody marks their "
        "parameters for the reduction over the tensor-parallel group; the mark is set, as fused norms"
        " do.",
        error_without="AssertionError: sequence parallel not supported by torch LayerNorm",
        when="sequence parallelism",
        apply=after_import("megatron.core.transformer.torch_norm", _mark_norms_for_sequence_parallelism),
    ),
    Piece(
        name="router_gemm",
        why="te_general_gemm is bound only where Transformer Engine is, and then read.",
        error_without="NameError: name 'te_general_gemm' is not defined",
        when="MoE",
        versions=">=0.16,<0.17",
        apply=after_import("megatron.core.transformer.moe.moe_utils", _name_the_missing_gemm),
    ),
    Piece(
        name="context_parallel_attention",
        why="The local attention refuses context parallelism, which Transformer Engine (or MindSpeed's "
        "ring attention) would do: keys and values are gathered over the group and masked in "
        "Megatron's zigzag order.",
        error_without="AssertionError: Context parallelism is only supported by TEDotProductAttention!",
        when="CP > 1",
        apply=after_import(
            "megatron.core.transformer.dot_product_attention", attend_over_context_parallel_group
        ),
    ),
)
