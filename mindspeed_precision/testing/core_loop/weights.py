"""Initial weights of the model that Megatron built: whole ones by name, each rank takes its part.

They are those of `testing.initial_weights`: drawn by numpy from the seed and the parameter's name, or read
from a safetensors file, so that runs on different frameworks and in different layouts start alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from numpy.typing import NDArray

from mindspeed_precision.errors import ConfigError
from mindspeed_precision.testing.initial_weights import initial_weights, load_weights, save_weights


def leave_uninitialised(tensor: Any) -> Any:
    """Return ``tensor`` as it is: an ``init_method`` for a model whose weights are set afterwards."""
    return tensor


def initialise(model: list[Any], *, seed: int) -> None:
    """Set every parameter of ``model`` (this rank's chunks) to its initial value."""
    _assign(model, initial_weights(_whole_shapes(model), seed))


def load(model: list[Any], file: Path) -> None:
    """Set every parameter of ``model`` from a safetensors file of unsharded parameters.

    Raises:
        ConfigError: the file holds other parameters than the model.
        DumpError: the file cannot be read, or a tensor has another type or shape.
    """
    _assign(model, load_weights(file, _whole_shapes(model)))


def save(model: list[Any], file: Path) -> None:
    """Write every parameter of ``model`` to a safetensors file.

    Raises:
        ConfigError: the model is tensor-parallel, so that no rank has it all.
    """
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        raise ConfigError(
            "only an unsharded model can be saved", where="--save-weights", remedy="save from a run at TP=1"
        )
    # copied: on MindSpore the array would be a window on the parameter itself
    save_weights(file, {name: p.detach().numpy().copy() for name, p in _named_parameters(model)})


def _named_parameters(model: list[Any]) -> Iterator[tuple[str, Any]]:
    for chunk in model:
        yield from chunk.named_parameters()


def _split(parameter: Any) -> tuple[int, int] | None:
    """Return ``(dimension, ranks)`` over which a parameter is split, or None for a replicated one."""
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    if ranks == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return None
    return int(parameter.partition_dim), int(ranks)


def _whole_shapes(model: list[Any]) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for name, parameter in _named_parameters(model):
        shape = [int(size) for size in parameter.shape]
        if split := _split(parameter):
            shape[split[0]] *= split[1]
        shapes[name] = tuple(shape)
    return shapes


def _own_part(whole: NDArray[np.float32], parameter: Any) -> NDArray[np.float32]:
    if split := _split(parameter):
        whole = np.split(whole, split[1], axis=split[0])[parallel_state.get_tensor_model_parallel_rank()]
    return np.ascontiguousarray(whole)


def _assign(model: list[Any], weights: dict[str, NDArray[np.float32]]) -> None:
    with torch.no_grad():
        for name, parameter in _named_parameters(model):
            parameter.copy_(torch.from_numpy(_own_part(weights[name], parameter)))
