"""Initial weights of a GPT as a function of names and a seed: runs on different frameworks start alike."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump.payload import PayloadFile, write_payload
from mindspeed_precision.errors import ConfigError

INIT_STD = 0.02
"""Standard deviation of matrices: Megatron's ``--init-method-std``."""
BIAS_STD = 0.01
"""Of biases of linears. Megatron's are zero at first, which would hide a bias that is left out."""

Weights = dict[str, NDArray[np.float32]]


def initial_weights(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Weights:
    """Return a float32 array for each parameter; it depends on its name, its shape and the seed alone.

    Normalisations start as the identity.

    Args:
        shapes: shape by parameter name, as Megatron names them.
        seed: of all draws; not negative.
    """
    return {name: _initial(name, shape, seed) for name, shape in shapes.items()}


def _initial(name: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    is_bias = name.endswith(".bias")
    if "norm" in name:
        return np.full(shape, 0.0 if is_bias else 1.0, dtype=np.float32)
    draws = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape)
    return (draws * (BIAS_STD if is_bias else INIT_STD)).astype(np.float32)


def load_weights(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Weights:
    """Read initial weights from a safetensors file of float32 tensors by parameter name.

    Args:
        path: the file.
        shapes: the names and shapes that the model has.

    Raises:
        ConfigError: the file holds other parameters than the model.
        DumpError: the file cannot be read, or a tensor has another type or shape.
    """
    file = PayloadFile(path)
    if strange := sorted(file.names ^ set(shapes)):
        raise ConfigError(
            "the weights are not this model's",
            where=str(path),
            found=f"{', '.join(strange[:4])} on one side only",
            expected=f"the model's {len(shapes)} parameters",
            remedy="write them from a model with the same settings",
        )
    tensors = {name: file.read(name, dtype="float32", shape=shape) for name, shape in shapes.items()}
    return {name: tensor.bits.view(np.float32) for name, tensor in tensors.items()}


def save_weights(path: Path, weights: Weights) -> None:
    """Write weights as a safetensors file that ``load_weights`` reads; its directory is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    bits = {name: np.ascontiguousarray(array).view(np.uint32) for name, array in weights.items()}
    write_payload(path, {name: HostTensor(bits=array, dtype="float32") for name, array in bits.items()})
