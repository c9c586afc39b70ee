"""What observers need of native MindSpore: cells, parameters, optimizers that are called with gradients.

PyNative mode, with ``value_and_grad`` or with the tape. Under ``value_and_grad`` gradients are never
accumulated in a parameter: they are seen when the optimizer is called with them, clipped already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import mindspore
from mindspore import Parameter, Tensor, nn
from mindspore.communication import GlobalComm, get_group_size, get_rank

from mindspeed_precision.backends.capture_base import AfterCall, BeforeCall, Handle, Update
from mindspeed_precision.backends.mindspore_capture import MindSporeTape
from mindspeed_precision.backends.torch_groups import applied_hyperparameters, split_groups
from mindspeed_precision.errors import PrecisionError

try:  # its home since 2.9, where the old one warns
    from mindspore.graph.api import _pynative_executor
except ImportError:
    from mindspore.common.api import _pynative_executor

_STATES = {"exp_avg": ("exp_avg", "moment1", "moments1"), "exp_avg_sq": ("exp_avg_sq", "moment2", "moments2")}
"""What MindSpore's optimizers call their states: ``mindspore.experimental.optim``, ``nn.Adam``, others."""

_STEP_COUNTERS = ("global_step", "state_step", "steps_taken")
"""What they call the number of steps that were made: ``nn.Optimizer``, ``experimental.optim``, others."""


class MindSporeCapture(MindSporeTape):
    """Implements ``backends.capture_base.CaptureBackend`` for ``nn.Cell`` in PyNative mode.

    Raises:
        PrecisionError: MindSpore is in graph mode.
    """

    api = "mindspore"
    patch_groups = ("mindspore", "mindspore_native")

    def __init__(self) -> None:
        if mindspore.get_context("mode") != mindspore.PYNATIVE_MODE:
            raise PrecisionError(
                "a compiled graph cannot be observed: hooks do not run in it",
                where="mindspore",
                found="GRAPH_MODE",
                expected="PYNATIVE_MODE",
                remedy="mindspore.set_context(mode=mindspore.PYNATIVE_MODE) before the model is built",
            )
        self._applied: dict[int, Any] = {}

    def grad_enabled(self) -> bool:
        """Tell whether the tape records."""
        return bool(_pynative_executor.grad_flag())

    def is_parameter(self, value: object) -> bool:
        """Tell whether it is a ``Parameter``."""
        return isinstance(value, Parameter)

    def is_module(self, value: object) -> bool:
        """Tell whether it is an ``nn.Cell``."""
        return isinstance(value, nn.Cell)

    def children(self, module: nn.Cell) -> Iterable[tuple[str, nn.Cell]]:
        """Yield the direct children."""
        return [(name, child) for name, child in module._cells.items() if child is not None]

    def own_parameters(self, module: nn.Cell) -> Iterable[tuple[str, Parameter]]:
        """Yield the cell's own parameters."""
        return [(name, value) for name, value in module._params.items() if value is not None]

    def own_buffers(self, module: nn.Cell) -> Iterable[tuple[str, Any, bool]]:
        """Yield what was registered with ``register_buffer``, where this version of cells has it."""
        passing = getattr(module, "_non_persistent_buffers_set", ())
        held = (getattr(module, "_buffers", None) or {}).items()
        return [(name, value, name not in passing) for name, value in held if value is not None]

    def is_training(self, module: nn.Cell) -> bool:
        """Return True: a cell is in train mode only where ``set_train`` was called, which few loops need.

        Whether a forward belongs to training is told by the tape (`grad_enabled`).
        """
        return True

    def hook_call(self, module: nn.Cell, before: BeforeCall, after: AfterCall) -> list[Handle]:
        """Register a forward pre-hook and a forward hook."""
        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]

    def is_optimizer(self, value: object) -> bool:
        """Tell whether it is a cell that holds ``parameters`` and is called with their gradients."""
        return isinstance(value, nn.Cell) and hasattr(value, "parameters")

    def hook_step(
        self, optimizer: Any, before: Callable[[], None], after: Callable[[], None]
    ) -> list[Handle]:
        """Hook the optimizer's call: its argument is the tuple of gradients, in the order of ``parameters``.

        Raises:
            PrecisionError: at the call: it is called with something else.
        """

        def first(cell: Any, args: tuple[Any, ...]) -> None:
            self._applied = _by_parameter(cell, args)
            before()

        def last(cell: Any, args: tuple[Any, ...], output: object) -> None:
            after()
            self._applied = {}

        return [optimizer.register_forward_pre_hook(first), optimizer.register_forward_hook(last)]

    def parameter_groups(self, optimizer: Any) -> Iterable[tuple[Mapping[str, Any], Sequence[Any]]]:
        """Return its groups; of an ``nn.Optimizer`` one, with its own attributes as settings."""
        return [
            ({**settings, **_hyperparameters(optimizer, settings)}, tensors)
            for settings, tensors in split_groups(_groups(optimizer))
        ]

    def updates(self, optimizer: Any) -> Iterator[Update]:
        """Yield every parameter with the gradient that the optimizer was called with."""
        groups = {id(p): group for group in _groups(optimizer) for p in group["params"]}
        for index, parameter in enumerate(optimizer.parameters):
            gradient = self._applied.get(id(parameter))
            if gradient is not None:
                yield Update(
                    updated=parameter,
                    gradient=gradient,
                    hyperparameters=_hyperparameters(optimizer, groups.get(id(parameter), {})),
                    states=_states(optimizer, index),
                )

    def rank(self) -> tuple[int, int]:
        """Return rank and world size; ``(0, 1)`` before ``mindspore.communication.init``."""
        if not GlobalComm.INITED:
            return 0, 1
        return int(get_rank()), int(get_group_size())

    def group_ranks(self, group: Any) -> Sequence[int]:
        """Return the ranks of a communication group, by its name; None: of the default group."""
        from mindspore.communication import get_process_group_ranks

        return [int(rank) for rank in get_process_group_ranks(group or GlobalComm.WORLD_COMM_GROUP)]

    def from_first_rank(self, value: Any) -> Any:
        """Broadcast a small object from rank 0."""
        if self.rank()[1] == 1:
            return value
        from mindspore.mint import distributed

        carried = [value]
        distributed.broadcast_object_list(carried, src=0)
        return carried[0]

    def wait_for_all(self) -> None:
        """Wait at a barrier of the default process group."""
        if self.rank()[1] > 1:
            from mindspore.mint import distributed

            distributed.barrier()


def _by_parameter(optimizer: Any, args: tuple[Any, ...]) -> dict[int, Any]:
    parameters = list(optimizer.parameters)
    gradients = args[0] if args else None
    if not isinstance(gradients, (tuple, list)) or len(gradients) != len(parameters):
        count = len(gradients) if isinstance(gradients, (tuple, list)) else type(gradients).__name__
        raise PrecisionError(
            "an optimizer was called with something else than its parameters' gradients",
            where=type(optimizer).__name__,
            found=str(count),
            expected=f"{len(parameters)} gradients, in the order of its `parameters`",
        )
    return {id(parameter): gradient for parameter, gradient in zip(parameters, gradients, strict=True)}


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    groups = getattr(optimizer, "param_groups", None)
    if isinstance(groups, list) and all(isinstance(group, dict) for group in groups):
        return groups
    return [{"params": list(optimizer.parameters)}]


def _hyperparameters(optimizer: Any, group: dict[str, Any]) -> dict[str, Any]:
    """Return what is applied, from the group, or from the attributes of an ``nn.Optimizer``."""
    found = applied_hyperparameters(group, {})
    rate = getattr(optimizer, "learning_rate", None)
    if "lr" not in found and isinstance(rate, (int, float, Tensor)):
        found["lr"] = rate
    for name, attribute in (("beta1", "beta1"), ("beta2", "beta2"), ("eps", "eps")):
        value = getattr(optimizer, attribute, None)
        if name not in found and isinstance(value, (int, float, Tensor)):
            found[name] = value
    for name in _STEP_COUNTERS:
        steps = getattr(optimizer, name, None)
        if isinstance(steps, (int, float, Tensor)):
            found["step"] = steps
    return found


def _states(optimizer: Any, index: int) -> dict[str, Any]:
    found = {}
    for role, names in _STATES.items():
        for name in names:
            kept = getattr(optimizer, name, None)
            if isinstance(kept, (tuple, list)) and index < len(kept):
                found[role] = kept[index]
                break
    return found
