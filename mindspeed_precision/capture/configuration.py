"""The configuration as it took effect, the versions, the parallel layout: what ``run.json`` says."""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from collections.abc import Mapping
from enum import Enum
from typing import Any

from mindspeed_precision.backends.capture_base import CaptureBackend
from mindspeed_precision.backends.npu import installed_version, loaded_npu
from mindspeed_precision.capture.installed import installed_versions
from mindspeed_precision.capture.optimizer_members import members
from mindspeed_precision.records import RankCoordinates

_ENVIRONMENT_PREFIXES = (
    "ASCEND_", "ATB_", "CLOSE_MATMUL", "CUBLAS_", "CUDA_", "CUSTOM_MATMUL", "GLOO_", "HCCL_", "INF_NAN",
    "LCCL_", "MKL_", "MS_", "NCCL_", "NVTE_", "OMP_", "ONEDNN_", "PYTHONHASHSEED", "TASK_QUEUE", "TORCH_",
)  # fmt: skip
_MODULES = (
    "torch", "torch_npu", "numpy", "megatron.core", "mindspeed", "mindspeed_llm", "mindspeed_mm", "mindspore",
    "mindtorch", "msadapter", "mindformers", "transformer_engine", "flash_attn", "apex", "transformers",
    "tokenizers", "sentencepiece",
)  # fmt: skip
_WITHOUT_VERSION = ("mindspeed", "mindspeed_llm", "mindspeed_mm")
"""Packages that keep no ``__version__``: their distributions may know it."""


def parallel_coordinates(backend: CaptureBackend) -> RankCoordinates:
    """Return this process's place in the parallel layout, from Megatron's state where it is initialised."""
    state = sys.modules.get("megatron.core.parallel_state")
    rank, world_size = backend.rank()
    if state is None or not state.model_parallel_is_initialized():
        return RankCoordinates(rank=rank, world_size=world_size, dp_rank=rank, dp_size=world_size)
    return RankCoordinates(
        rank=rank,
        world_size=world_size,
        tp_rank=state.get_tensor_model_parallel_rank(),
        tp_size=state.get_tensor_model_parallel_world_size(),
        pp_rank=state.get_pipeline_model_parallel_rank(),
        pp_size=state.get_pipeline_model_parallel_world_size(),
        dp_rank=state.get_data_parallel_rank(),
        dp_size=state.get_data_parallel_world_size(),
        cp_rank=state.get_context_parallel_rank(),
        cp_size=state.get_context_parallel_world_size(),
        ep_rank=state.get_expert_model_parallel_rank(),
        ep_size=state.get_expert_model_parallel_world_size(),
    )


def plain(value: object) -> Any:
    """Return ``value`` as JSON can hold it; what has no stable text (addresses) becomes its type's name."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if type(value).__name__ in ("dtype", "device"):  # torch's
        return str(value).removeprefix("torch.")
    if type(value).__module__ == "mindspore._c_expression.typing":  # 'Float32', or 'mindspore.float32'
        return str(value).removeprefix("mindspore.").lower()
    name = getattr(value, "__qualname__", None)
    return f"{getattr(value, '__module__', '')}.{name}" if name else f"<{type(value).__qualname__}>"


def effective_configuration(chunks: list[Any], optimizer: Any) -> dict[str, dict[str, Any]]:
    """Return the configuration objects that the run really uses, as plain data by kind."""
    found: dict[str, dict[str, Any]] = {}
    global_vars = sys.modules.get("megatron.training.global_vars")
    if global_vars is not None and global_vars._GLOBAL_ARGS is not None:
        found["megatron_args"] = plain(vars(global_vars.get_args()))
        size = getattr(getattr(global_vars, "_GLOBAL_TOKENIZER", None), "vocab_size", None)
        found |= {"vocabulary": {"size": size}} if isinstance(size, int) else {}
    first = chunks[0]
    for name, owner, attribute in (
        ("transformer_config", first, "config"),
        ("ddp_config", first, "ddp_config"),
        *(("optimizer_config", member, "config") for member in members(optimizer)),
    ):
        config = getattr(owner, attribute, None)
        told = getattr(config, "to_dict", None)
        if name == "transformer_config" and callable(told):
            found["model_config"] = plain(told())  # Hugging Face's and MindFormers' models
        elif dataclasses.is_dataclass(config) and name not in found:
            # not asdict: it deep-copies, and a config may hold process groups
            found[name] = {
                entry.name: plain(getattr(config, entry.name, None)) for entry in dataclasses.fields(config)
            }
    return found


def versions() -> dict[str, str]:
    """Return the version of every loaded package that matters, of CANN and of the driver; missing: not there.

    They are read from the module itself, else from its distribution. An installed torch_npu is named also
    where it is not loaded: this run then computed on something else.
    """
    found = {"python": platform.python_version()}
    for name in _MODULES:
        module = sys.modules.get(name)
        version = getattr(module, "__version__", None)
        if version is None and module is not None and name in _WITHOUT_VERSION:
            version = installed_version(name.replace("_", "-")) or None
        if version is not None:
            found[name] = str(version)
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    found |= {"cuda": str(cuda)} if cuda else {}
    found |= installed_versions(os.environ)
    npu = loaded_npu()
    if npu.installed and not npu.loaded:
        found["torch_npu"] = f"{npu.installed}, not loaded"
    return found


def environment() -> dict[str, str]:
    """Return the environment variables that can change numerics."""
    return {
        name: value for name, value in sorted(os.environ.items()) if name.startswith(_ENVIRONMENT_PREFIXES)
    }
