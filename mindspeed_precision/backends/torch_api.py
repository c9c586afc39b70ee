"""What torch's own text gives to observers, on whatever it computes: modules, optimizers, process groups.

A shim (MSAdapter, mindtorch) has it, too; tensors and autograd are another matter there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mindspeed_precision.backends.base import Backend
from mindspeed_precision.backends.capture_base import AfterCall, BeforeCall, Handle, Update
from mindspeed_precision.backends.torch_groups import group_updates, split_groups


class TorchApi(Backend):
    """The part of ``capture_base.CaptureBackend`` that torch's Python API answers."""

    api = "torch"

    def grad_enabled(self) -> bool:
        """Tell whether autograd records."""
        return bool(torch.is_grad_enabled())

    def is_parameter(self, value: object) -> bool:
        """Tell whether it is an ``nn.Parameter``."""
        return isinstance(value, nn.Parameter)

    def is_module(self, value: object) -> bool:
        """Tell whether it is an ``nn.Module``."""
        return isinstance(value, nn.Module)

    def children(self, module: Any) -> Iterable[tuple[str, Any]]:
        """Yield the direct children."""
        return [(name, child) for name, child in module._modules.items() if child is not None]

    def own_parameters(self, module: Any) -> Iterable[tuple[str, Any]]:
        """Yield the module's own parameters."""
        return [(name, value) for name, value in module._parameters.items() if value is not None]

    def own_buffers(self, module: Any) -> Iterable[tuple[str, Any, bool]]:
        """Yield the module's own registered buffers."""
        passing = getattr(module, "_non_persistent_buffers_set", ())
        held = module._buffers.items()
        return [(name, value, name not in passing) for name, value in held if value is not None]

    def is_training(self, module: Any) -> bool:
        """Tell whether ``module.train()`` was the last word."""
        return bool(module.training)

    def hook_call(self, module: Any, before: BeforeCall, after: AfterCall) -> list[Handle]:
        """Register a forward pre-hook ahead of the others and a forward hook behind them."""
        return [
            module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]

    def is_optimizer(self, value: object) -> bool:
        """Tell whether it is one of ``torch.optim``."""
        return isinstance(value, torch.optim.Optimizer)

    def hook_step(
        self, optimizer: Any, before: Callable[[], None], after: Callable[[], None]
    ) -> list[Handle]:
        """Register the optimizer's own step hooks."""
        return [
            optimizer.register_step_pre_hook(lambda *_: before()),
            optimizer.register_step_post_hook(lambda *_: after()),
        ]

    def parameter_groups(self, optimizer: Any) -> Iterable[tuple[Mapping[str, Any], Sequence[Any]]]:
        """Return ``param_groups``."""
        return split_groups(optimizer.param_groups)

    def updates(self, optimizer: Any) -> Iterator[Update]:
        """Yield everything in the optimizer's groups that has a gradient."""
        return group_updates(self, optimizer)

    def rank(self) -> tuple[int, int]:
        """Return rank and world size of the default process group."""
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return 0, 1
        return int(distributed.get_rank()), int(distributed.get_world_size())

    def group_ranks(self, group: Any) -> Sequence[int]:
        """Return the ranks of a process group, as numbers of the world; None: of the default group."""
        return [int(rank) for rank in torch.distributed.get_process_group_ranks(group)]

    def from_first_rank(self, value: Any) -> Any:
        """Broadcast a small object from rank 0."""
        if self.rank()[1] == 1:
            return value
        carried = [value]
        torch.distributed.broadcast_object_list(carried, src=0)
        return carried[0]

    def wait_for_all(self) -> None:
        """Wait at a barrier of the default process group."""
        if self.rank()[1] > 1:
            torch.distributed.barrier()
