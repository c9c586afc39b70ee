"""fprop and dgrad at module boundaries.

Forward hooks see inputs and outputs; gradients come from hooks on the *tensors*. A full backward hook would
put an identity function into the graph, which reorders the sum of a gradient that has several consumers and
so changes the bits of the run that is observed (measured on msprobe; ``tests/capture/test_bit_neutrality.py``
shows it on torch's own hook).

The gradient recorded at a module's input is therefore the gradient of that *tensor*: where other modules
consume it too (a residual branch), it is the sum over all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mindspeed_precision.capture.clock import Call
from mindspeed_precision.capture.context import CaptureContext
from mindspeed_precision.records import Phase, Role


def tensors_of(value: object, slot: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(slot, tensor)`` of every tensor in nested tuples, lists, mappings and dataclasses.

    Slots join with dots.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping)):
        value = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, torch.Tensor):
        yield slot, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from tensors_of(item, f"{slot}.{name}" if slot else str(name))
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from tensors_of(item, f"{slot}.{index}" if slot else str(index))


def attach_modules(context: CaptureContext) -> list[Any]:
    """Hook every module; with ``capture.modules`` off only what tells the microbatch."""
    hooks = _InputHooks()
    handles: list[Any] = [hooks]
    chunks = {id(root): index for index, root in enumerate(context.names.roots)}
    for fqn, module in context.names.modules:
        chunk = chunks.get(id(module))
        handles.append(
            module.register_forward_pre_hook(
                _before(context, fqn, chunk, hooks), with_kwargs=True, prepend=True
            )
        )
        handles.append(module.register_forward_hook(_after(context, fqn, chunk, hooks), with_kwargs=True))
    return handles


class _InputHooks:
    """Hooks on the inputs of running calls, so that a call that returns its input can reorder them.

    A leaf that the loop feeds again and again would collect one hook per call: those are removed when the
    next step runs the model.
    """

    def __init__(self) -> None:
        self._running: dict[Call, dict[int, tuple[str, RemovableHandle, int]]] = {}
        self._leaves: list[RemovableHandle] = []
        self._step: int | None = None
        self.asleep = False

    def begin(self, step: int) -> None:
        """The model is called in ``step``: forget what an earlier one left.

        A model that is called without gradients is being evaluated, whatever mode it is in: nothing of that
        call is part of training.
        """
        self.asleep = not torch.is_grad_enabled()
        if step != self._step:
            self.remove()
            self._step = step

    def remove(self) -> None:
        """Remove the hooks that outlive their call, and forget calls that never ended."""
        for handle in self._leaves:
            handle.remove()
        self._leaves.clear()
        self._running.clear()

    def add(self, context: CaptureContext, call: Call, tensor: torch.Tensor, slot: str) -> None:
        """Hook the gradient of an input."""
        handle = _observe_gradient(context, call, Role.GRAD_INPUT, tensor, slot)
        if handle is not None:
            self._running.setdefault(call, {})[id(tensor)] = (slot, handle, tensor._version)
            self.keep(tensor, handle)

    def keep(self, tensor: torch.Tensor, handle: RemovableHandle | None) -> None:
        """Remember a hook on a tensor that may outlive the step; the graph takes the others with it."""
        if handle is not None and tensor.is_leaf:
            self._leaves.append(handle)

    def take(self, call: Call) -> dict[int, tuple[str, RemovableHandle, int]]:
        """Return and forget the hooks of ``call``, by the ``id`` of their tensor, which is still alive.

        The last entry is the tensor's version: what was written in place is no longer what came in.
        """
        return self._running.pop(call, {})


def _before(context: CaptureContext, fqn: str, chunk: int | None, hooks: _InputHooks) -> Callable[..., None]:
    clock, wanted = context.clock, context.settings.modules

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not clock.in_step or not context.training:
            return
        if chunk is not None:
            hooks.begin(context.recorder.step)
        if hooks.asleep:
            return
        if chunk is not None:
            clock.begin_forward(chunk)
        call = clock.enter(fqn)
        if not wanted:
            return
        for slot, tensor in (*tensors_of(args), *tensors_of(kwargs)):
            context.observe_call(call, Phase.FPROP, Role.INPUT, tensor, slot)
            hooks.add(context, call, tensor, slot)

    return before


def _after(context: CaptureContext, fqn: str, chunk: int | None, hooks: _InputHooks) -> Callable[..., None]:
    clock, wanted = context.clock, context.settings.modules

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        if hooks.asleep:
            hooks.asleep = chunk is None
            return
        call = clock.leave(fqn) if clock.in_step and context.training else None
        if call is None:
            return
        inputs = hooks.take(call)
        for slot, tensor in tensors_of(output):
            if chunk is not None and tensor.requires_grad:
                hooks.keep(tensor, tensor.register_hook(_tell_backward_microbatch(context, call)))
            if wanted:
                context.observe_call(call, Phase.FPROP, Role.OUTPUT, tensor, slot or "0")
                hooks.keep(tensor, _observe_gradient(context, call, Role.GRAD_OUTPUT, tensor, slot or "0"))
                input_slot, handle, version = inputs.get(id(tensor), ("", None, -1))
                if handle is not None and tensor._version == version:
                    # returned as it came: its gradient arrives before it leaves
                    handle.remove()
                    hooks.add(context, call, tensor, input_slot)

    return after


def _tell_backward_microbatch(context: CaptureContext, call: Call) -> Callable[[torch.Tensor], None]:
    def tell(grad: torch.Tensor) -> None:
        context.clock.backward_microbatch = call.microbatch

    return tell


def _observe_gradient(
    context: CaptureContext, call: Call, role: Role, tensor: torch.Tensor, slot: str
) -> RemovableHandle | None:
    if not (torch.is_grad_enabled() and tensor.requires_grad) or isinstance(tensor, nn.Parameter):
        return None

    step = context.recorder.step

    def observe(grad: torch.Tensor) -> None:
        if not context.clock.in_step or context.recorder.step != step:
            return
        context.clock.backward_microbatch = call.microbatch
        context.observe_call(call, Phase.DGRAD, role, grad, slot)

    return tensor.register_hook(observe)
