"""This rank's parameters and optimizer, as what a recorded state, or noise, is loaded into."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.align.state import MOMENTS, StateBefore
from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.backends.detect import TORCH, capture_backend
from mindspeed_precision.capture.configuration import parallel_coordinates
from mindspeed_precision.capture.names import canonical_names
from mindspeed_precision.capture.optimizer_members import inner_names, members, own_ranges
from mindspeed_precision.capture.placement import placements
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.record.placement import canonical_index, cut
from mindspeed_precision.records import Part, Placement, Role

Change = Callable[[str, Placement, Callable[[], HostTensor]], HostTensor | None]
"""From canonical name, placement and elements of what this rank holds to others; None leaves it."""


class LiveState:
    """The parameters and the optimizer of this rank, as something that a recorded state is loaded into.

    Args:
        chunks: the model chunks of this rank.
        optimizer: the one that the loop steps; or None.
        setting: the setting that asked for it, for messages.

    Raises:
        ConfigError: this framework cannot load, or an optimizer that gathers while it steps.
    """

    def __init__(self, chunks: Sequence[Any], optimizer: Any, *, setting: str) -> None:
        backend = capture_backend()
        if backend.framework != TORCH:
            raise ConfigError(
                "parameters can be loaded into a model of torch alone", where=setting, found=backend.framework
            )
        early = "overlap_param_gather_with_optimizer_step"
        if any(getattr(getattr(member, "config", None), early, False) for member in members(optimizer)):
            raise ConfigError(
                "parameters are on their way while they would be loaded", where=setting, found=early
            )
        self._backend = backend
        self._optimizer = optimizer
        self._setting = setting
        self._names = canonical_names(backend, chunks)
        self._placed = placements(backend, self._names, parallel_coordinates(backend))

    def load_parameters(self, state: StateBefore) -> None:
        """Load every parameter of this rank, and let the optimizer's copies follow."""
        from mindspeed_precision.backends.torch_load import load_tensor

        for fqn, parameter in self._names.parameters:
            placement = self._placement(fqn)
            dtype = self._backend.dtype(parameter)
            whole = state.parameter(placement.copy_of or fqn, shape=placement.shape, dtype=dtype)
            shard = _Shard(fqn=fqn, placement=placement, span=None)
            load_tensor(parameter, shard.of(whole, self._host(parameter)))
        self._reload()

    def change_parameters(
        self, change: Callable[[str, Placement, Callable[[], HostTensor]], HostTensor | None]
    ) -> None:
        """Give every parameter other elements, and let the optimizer's copies follow.

        Args:
            change: says which.
        """
        from mindspeed_precision.backends.torch_load import load_tensor

        for fqn, parameter in self._names.parameters:
            placement = self._placement(fqn)
            changed = change(placement.copy_of or fqn, placement, self._host(parameter.data))
            if changed is not None:
                load_tensor(parameter, changed)
        self._reload()

    def _reload(self) -> None:
        if hasattr(self._optimizer, "reload_model_params"):  # Megatron's, which may keep copies in float32
            self._optimizer.reload_model_params()

    def load_optimizer(self, state: StateBefore) -> None:
        """Load what the optimizer keeps of each parameter, or of this rank's range of it, and its counts."""
        names = inner_names(self._backend, self._names.parameters, self._optimizer)
        ranges = own_ranges(self._names.parameters, self._optimizer)
        own = {id(parameter) for _, parameter in self._names.parameters}
        for inner, updated in self._updated():
            fqn = names.get(id(updated), "")
            if not fqn:
                raise ConfigError(
                    "the optimizer updates a tensor of which it is not known which parameter it is",
                    where=self._setting,
                    found=f"{self._backend.dtype(updated)}{list(updated.shape)}",
                )
            shard = _Shard(fqn=fqn, placement=self._placement(fqn), span=ranges.get(fqn))
            if id(updated) not in own:
                self._load_master(state, updated, shard)
            self._load_moments(state, inner, updated, shard)

    def _placement(self, fqn: str) -> Placement:
        placement = self._placed[fqn]
        if placement is None:
            raise ConfigError(f"it is not known which shard of {fqn} this rank holds", where=self._setting)
        return placement

    def _host(self, tensor: Any) -> Callable[[], HostTensor]:
        return lambda: self._backend.to_host(self._backend.snapshot(tensor))

    def _updated(self) -> Iterator[tuple[Any, Any]]:
        """Yield every tensor that an optimizer of torch updates, with that optimizer."""
        for inner in members(self._optimizer):
            if self._backend.is_optimizer(inner):
                for group in inner.param_groups:
                    yield from ((inner, updated) for updated in group["params"])

    def _load_master(self, state: StateBefore, updated: Any, shard: _Shard) -> None:
        """Load the copy that the optimizer updates; a reference without one updates the parameter itself."""
        from mindspeed_precision.backends.torch_load import load_tensor

        shape, dtype = shard.placement.shape, self._backend.dtype(updated)
        whole = state.of_optimizer(shard.name, Role.MASTER_PARAM, shape=shape, dtype=dtype)
        if whole is None and state.count(shard.name) is not None:
            whole = state.parameter(shard.name, shape=shape, dtype=dtype)
        if whole is not None:  # else never updated: the copy of the parameter that was just loaded
            load_tensor(updated, shard.of(whole, self._host(updated)))

    def _load_moments(self, state: StateBefore, inner: Any, updated: Any, shard: _Shard) -> None:
        from mindspeed_precision.backends.torch_load import LiveMoments

        live, count = LiveMoments(inner, updated), state.count(shard.name)
        if count is None:
            live.forget()
            return
        found: dict[str, HostTensor] = {}
        for role in MOMENTS:
            dtype = live.dtype(self._backend, role.value)
            whole = state.of_optimizer(shard.name, role, shape=shard.placement.shape, dtype=dtype)
            if whole is not None:
                found[role.value] = shard.of(whole, self._host(live.tensor(role.value)))
        lacking = sorted(live.kept - found.keys())
        if lacking:
            raise ConfigError(
                f"the optimizer keeps more of {shard.fqn} than the reference recorded",
                where=self._setting,
                found=", ".join(lacking),
                expected=", ".join(found) or "nothing",
                remedy="train both with the same optimizer; of Adam's kind exp_avg and exp_avg_sq are known",
            )
        if found:
            live.set_count(count)
        for name, elements in found.items():
            live.load(name, elements)


@dataclass(frozen=True, kw_only=True)
class _Shard:
    """What this rank's optimizer updates of one parameter.

    Attributes:
        fqn: of the parameter.
        placement: where what the rank holds sits in the canonical tensor.
        span: the elements of what the rank holds, of a distributed optimizer; None: all.
    """

    fqn: str
    placement: Placement
    span: tuple[int, int] | None

    @property
    def name(self) -> str:
        """Canonical name: a copy on another pipeline stage has that of the first."""
        return self.placement.copy_of or self.fqn

    def of(self, whole: HostTensor, held: Callable[[], HostTensor]) -> HostTensor:
        """Cut this out of a canonical tensor; rows of padding that it lacks stay as they are held."""
        bits = whole.bits
        if bits.shape != self.placement.shape:
            bits = self._over_padding(bits, held().bits)
        bits = cut(bits, self.placement)
        if self.span is not None:
            bits = bits.reshape(-1)[self.span[0] : self.span[1]]
        return HostTensor(bits=bits, dtype=whole.dtype)

    def _over_padding(self, start: NDArray[Any], held: NDArray[Any]) -> NDArray[Any]:
        """Return a canonical tensor with the rows that the start has; the others as this rank holds them.

        Args:
            start: ``[rows, ...]``, padded otherwise.
            held: what this is of now, of any shape.
        """
        first, last = self.span or (0, self.placement.local_numel)
        bits = np.zeros(self.placement.shape, held.dtype)
        index = canonical_index(Part(placement=self.placement, start=first, stop=last))
        bits.reshape(-1)[index] = held.reshape(-1)
        rows = min(len(bits), len(start))
        bits[:rows] = start[:rows]
        return bits
