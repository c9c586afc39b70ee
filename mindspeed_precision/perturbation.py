"""A run with one rounding of noise in its parameters: what shows how a model lets rounding grow."""

from __future__ import annotations

from typing import Any

from mindspeed_precision.backends.detect import TORCH, capture_backend
from mindspeed_precision.capture.configuration import parallel_coordinates
from mindspeed_precision.capture.names import canonical_names
from mindspeed_precision.capture.placement import placements
from mindspeed_precision.config import PerturbSettings
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.record.elements import UNIT_ROUNDOFF
from mindspeed_precision.record.noise import perturbed
from mindspeed_precision.record.placement import canonical_index
from mindspeed_precision.records import Part


def perturb(settings: PerturbSettings, chunks: list[Any], optimizer: Any) -> None:
    """Put relative noise on the parameters of this rank (``record.noise``); the optimizer's copies follow.

    The noise depends on the canonical name and number of an element, and so not on the layout. Called once,
    before the first step.

    Args:
        settings: how much, and on which parameters.
        chunks: the model chunks of this rank.
        optimizer: the one that the loop steps; or None.

    Raises:
        ConfigError: no parameter has such a name, or this framework cannot load parameters.
    """
    backend = capture_backend()
    if backend.framework != TORCH:
        raise ConfigError(
            "parameters can be perturbed in a model of torch alone", where="perturb", found=backend.framework
        )
    from mindspeed_precision.backends.torch_load import load_tensor

    names = canonical_names(backend, chunks)
    placed = placements(backend, names, parallel_coordinates(backend))
    for fqn, parameter in names.parameters:
        placement = placed[fqn]
        if placement is None:
            raise ConfigError(f"it is not known which shard of {fqn} this rank holds", where="perturb")
        name = placement.copy_of or fqn
        if backend.dtype(parameter) not in UNIT_ROUNDOFF or not settings.applies(name):
            continue
        index = canonical_index(Part(placement=placement, start=0, stop=placement.local_numel))
        host = backend.to_host(backend.snapshot(parameter.data))
        noisy = perturbed(host, index, name=name, seed=settings.seed, epsilon=settings.size)
        load_tensor(parameter, noisy)
    if hasattr(optimizer, "reload_model_params"):  # Megatron's, which may keep copies in float32
        optimizer.reload_model_params()
