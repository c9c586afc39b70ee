"""A run with one rounding of noise in its parameters: what shows how a model lets rounding grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.config import PerturbSettings
from mindspeed_precision.live_state import LiveState
from mindspeed_precision.record.elements import UNIT_ROUNDOFF
from mindspeed_precision.record.noise import perturbed
from mindspeed_precision.record.placement import canonical_index
from mindspeed_precision.records import Part, Placement


def perturb(settings: PerturbSettings, chunks: Sequence[Any], optimizer: Any) -> None:
    """Put relative noise on the parameters of this rank (``record.noise``); the optimizer's copies follow.

    The noise depends on the canonical name and number of an element, and so not on the layout. Called before
    the first step, and with ``reference`` before each step that takes a state. A pattern that is of no
    parameter of any rank moves nothing, which ``compare --calibrate`` says.

    Args:
        settings: how much, and on which parameters.
        chunks: the model chunks of this rank.
        optimizer: the one that the loop steps; or None.

    Raises:
        ConfigError: this framework cannot load parameters, or it is not known where one sits.
    """

    def noisy(name: str, placement: Placement, held: Callable[[], HostTensor]) -> HostTensor | None:
        host = held() if settings.applies(name) else None
        if host is None or host.dtype not in UNIT_ROUNDOFF:
            return None
        index = canonical_index(Part(placement=placement, start=0, stop=placement.local_numel))
        return perturbed(host, index, name=name, seed=settings.seed, epsilon=settings.size)

    LiveState(chunks, optimizer, setting="perturb").change_parameters(noisy)
