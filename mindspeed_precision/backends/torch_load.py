"""Elements of recorded tensors into live ones of torch: parameters, and what an optimizer keeps of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mindspeed_precision.backends.base import Backend, HostTensor
from mindspeed_precision.backends.torch_digest import ELEMENTS

_COUNT = "step"


def load_tensor(tensor: torch.Tensor, host: HostTensor) -> None:
    """Copy elements into a tensor in place; autograd does not see it.

    Args:
        tensor: ``[...]`` of any strides, on any device.
        host: the elements; same number and dtype.
    """
    bits = np.ascontiguousarray(host.bits)
    signed = torch.from_numpy(bits.view(f"i{bits.dtype.itemsize}").copy())
    values = signed.view(ELEMENTS[tensor.dtype].view).view(tensor.dtype).reshape(tensor.shape)
    with torch.no_grad():
        tensor.data.copy_(values)


class LiveMoments:
    """What an optimizer of ``torch.optim`` keeps of one tensor that it updates.

    Args:
        optimizer: the optimizer.
        updated: the tensor.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, updated: torch.Tensor) -> None:
        self._optimizer = optimizer
        self._updated = updated
        self._group = next(g for g in optimizer.param_groups if any(p is updated for p in g["params"]))

    @property
    def kept(self) -> set[str]:
        """Names of the tensors that are kept, the count left out."""
        state = self._optimizer.state.get(self._updated, {})
        return {name for name, value in state.items() if isinstance(value, torch.Tensor) and name != _COUNT}

    def tensor(self, name: str) -> torch.Tensor:
        """Return a kept tensor, or zeros as it would be kept."""
        state = self._optimizer.state.get(self._updated, {})
        kept = state.get(name)
        return torch.zeros_like(self._updated) if kept is None else kept

    def dtype(self, backend: Backend, name: str) -> str:
        """Return the type in which a tensor is, or would be, kept."""
        state = self._optimizer.state.get(self._updated, {})
        return backend.dtype(state.get(name, self._updated))

    def forget(self) -> None:
        """Drop all, as before the first update."""
        self._optimizer.state.pop(self._updated, None)

    def set_count(self, count: float) -> None:
        """Set how many updates were made, wherever and as whatever it is counted."""
        holder: dict[str, Any] = (
            self._group if _COUNT in self._group else self._optimizer.state[self._updated]
        )
        known = holder.get(_COUNT)
        if isinstance(known, torch.Tensor):
            known.fill_(count)
        else:  # torch counts in float32 on the host, others with an int
            holder[_COUNT] = torch.tensor(count) if known is None else type(known)(count)

    def load(self, name: str, host: HostTensor) -> None:
        """Load a kept tensor, which is made where the optimizer had no need of it yet."""
        state = self._optimizer.state[self._updated]
        if name not in state:
            state[name] = torch.zeros_like(self._updated, memory_format=torch.preserve_format)
        load_tensor(state[name], host)
