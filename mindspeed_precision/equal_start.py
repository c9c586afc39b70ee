"""Begin as another run began: initial weights depend on the parallel layout, so runs need a common start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_precision.align.initial import InitialParameters
from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.backends.detect import TORCH, capture_backend
from mindspeed_precision.capture.configuration import parallel_coordinates
from mindspeed_precision.capture.names import canonical_names
from mindspeed_precision.capture.placement import placements
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.record.placement import canonical_index, cut
from mindspeed_precision.records import Part, Placement


def start_from(directory: str | Path, chunks: list[Any], optimizer: Any) -> None:
    """Load the parameters that a recorded run began with, by canonical name, into this rank's shards.

    The optimizer's own copies of the parameters follow. Called before the first step.

    Args:
        directory: the run; its layout may be any.
        chunks: the model chunks of this rank.
        optimizer: the one that the loop steps; or None.

    Raises:
        ConfigError: a parameter was not recorded there with all its elements, or this framework cannot load.
        IncomparableError: a parameter has another shape or dtype there.
        DumpError: the run cannot be read.
    """
    backend = capture_backend()
    if backend.framework != TORCH:
        raise ConfigError(
            "parameters can be loaded into a model of torch alone", where="init_from", found=backend.framework
        )
    from mindspeed_precision.backends.torch_load import load_parameter

    names = canonical_names(backend, chunks)
    placed = placements(backend, names, parallel_coordinates(backend))
    start = InitialParameters(load_run(directory))
    for fqn, parameter in names.parameters:
        placement = placed[fqn]
        if placement is None:
            raise ConfigError(f"it is not known which shard of {fqn} this rank holds", where="init_from")
        name = placement.copy_of or fqn
        whole = start.read(name, shape=placement.shape, dtype=backend.dtype(parameter))
        if whole.bits.shape != placement.shape:
            whole = _over_padding(whole, backend.to_host(backend.snapshot(parameter)), placement)
        load_parameter(parameter, HostTensor(bits=cut(whole.bits, placement), dtype=whole.dtype))
    if hasattr(optimizer, "reload_model_params"):  # Megatron's, which may keep copies in float32
        optimizer.reload_model_params()


def _over_padding(start: HostTensor, held: HostTensor, placement: Placement) -> HostTensor:
    """Return a canonical tensor with the rows that the start has; the others as this rank holds them.

    Args:
        start: ``[rows, ...]``, padded otherwise.
        held: ``[...]`` of the placement's local shape.
        placement: where ``held`` sits.
    """
    bits = np.zeros(placement.shape, held.bits.dtype)
    index = canonical_index(Part(placement=placement, start=0, stop=placement.local_numel))
    bits.reshape(-1)[index] = held.bits.reshape(-1)
    rows = min(len(bits), len(start.bits))
    bits[:rows] = start.bits[:rows]
    return HostTensor(bits=bits, dtype=held.dtype)
