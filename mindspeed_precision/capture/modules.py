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
from dataclasses import dataclass
from typing import Any

from mindspeed_precision.backends.capture_base import AfterCall, BeforeCall, CaptureBackend, Handle
from mindspeed_precision.capture.clock import Call
from mindspeed_precision.capture.context import CaptureContext
from mindspeed_precision.records import Phase, Role


def tensors_of(backend: CaptureBackend, value: object, slot: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(slot, tensor)`` of every tensor in nested tuples, lists, mappings and dataclasses.

    Slots join with dots.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping)):
        value = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if backend.is_tensor(value):
        yield slot, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from tensors_of(backend, item, f"{slot}.{name}" if slot else str(name))
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from tensors_of(backend, item, f"{slot}.{index}" if slot else str(index))


def attach_modules(context: CaptureContext) -> list[Any]:
    """Hook every module; with ``capture.modules`` off only what tells the microbatch."""
    backend = context.backend
    hooks = _InputHooks(backend)
    handles: list[Any] = [hooks]
    chunks = {id(root): index for index, root in enumerate(context.names.roots)}
    hook = context.containment.hook
    for fqn, module in context.names.modules:
        chunk = chunks.get(id(module))
        named = fqn or "the model"
        before = hook(f"the call of {named}", _before(context, fqn, chunk, hooks))
        after = hook(f"the result of {named}", _after(context, fqn, chunk, hooks))
        handles += backend.hook_call(module, before, after)
    return handles


@dataclass(frozen=True, kw_only=True)
class _InputHook:
    """A hook on an input of a running call.

    Attributes:
        slot: which input.
        tensor: the input itself; the caller holds it until the call ends.
        version: of the tensor when it came in: what was written in place is no longer what came in.
        handle: of the hook.
    """

    slot: str
    tensor: Any
    version: int
    handle: Handle


class _InputHooks:
    """Hooks on the inputs of running calls, so that a call that returns its input can reorder them.

    A leaf that the loop feeds again and again would collect one hook per call: those are removed when the
    next step runs the model.
    """

    def __init__(self, backend: CaptureBackend) -> None:
        self._backend = backend
        self._running: dict[Call, dict[int, _InputHook]] = {}
        self._leaves: list[Handle] = []
        self._step: int | None = None
        self.asleep = False

    def begin(self, step: int) -> None:
        """The model is called in ``step``: forget what an earlier one left.

        A model that is called without gradients is being evaluated, whatever mode it is in: nothing of that
        call is part of training.
        """
        self.asleep = not self._backend.grad_enabled()
        if step != self._step:
            self.remove()
            self._step = step

    def remove(self) -> None:
        """Remove the hooks that outlive their call, and forget calls that never ended."""
        for handle in self._leaves:
            handle.remove()
        self._leaves.clear()
        self._running.clear()

    def add(self, context: CaptureContext, call: Call, tensor: Any, slot: str) -> None:
        """Hook the gradient of an input."""
        handle = _observe_gradient(context, call, Role.GRAD_INPUT, tensor, slot)
        if handle is not None:
            version = self._backend.version(tensor)
            hook = _InputHook(slot=slot, tensor=tensor, version=version, handle=handle)
            self._running.setdefault(call, {})[id(tensor)] = hook
            self.keep(tensor, handle)

    def keep(self, tensor: Any, handle: Handle | None) -> None:
        """Remember a hook on a tensor that may outlive the step; the graph takes the others with it."""
        if handle is not None and self._backend.is_leaf(tensor):
            self._leaves.append(handle)

    def take(self, call: Call) -> dict[int, _InputHook]:
        """Return and forget the hooks of ``call``, by the ``id`` of their tensor, which is still alive."""
        return self._running.pop(call, {})


def _before(context: CaptureContext, fqn: str, chunk: int | None, hooks: _InputHooks) -> BeforeCall:
    clock, wanted, backend = context.clock, context.settings.modules, context.backend

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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
        for slot, tensor in (*tensors_of(backend, args), *tensors_of(backend, kwargs)):
            context.observe_call(call, Phase.FPROP, Role.INPUT, tensor, slot)
            hooks.add(context, call, tensor, slot)

    return before


def _after(context: CaptureContext, fqn: str, chunk: int | None, hooks: _InputHooks) -> AfterCall:
    clock, wanted, backend = context.clock, context.settings.modules, context.backend

    def after(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        if hooks.asleep:
            hooks.asleep = chunk is None
            return
        call = clock.leave(fqn) if clock.in_step and context.training else None
        if call is None:
            return
        inputs = hooks.take(call)
        for hook in inputs.values():
            _follow_write(context, call, hook)
        for slot, tensor in tensors_of(backend, output):
            if chunk is not None and backend.requires_grad(tensor):
                hooks.keep(tensor, backend.hook_gradient(tensor, _tell_backward_microbatch(context, call)))
            if wanted:
                context.observe_call(call, Phase.FPROP, Role.OUTPUT, tensor, slot or "0")
                hooks.keep(tensor, _observe_gradient(context, call, Role.GRAD_OUTPUT, tensor, slot or "0"))
                came_in = inputs.get(id(tensor))
                if came_in is not None and backend.version(tensor) == came_in.version:
                    # returned as it came: its gradient arrives before it leaves
                    came_in.handle.remove()
                    hooks.add(context, call, tensor, came_in.slot)

    return after


def _follow_write(context: CaptureContext, call: Call, hook: _InputHook) -> None:
    """See the gradient of an input that was written in place: the hook on a view is lost with the write."""
    if context.backend.version(hook.tensor) == hook.version + 1:
        observe = _gradient_observer(context, call, Role.GRAD_INPUT, hook.slot)
        context.backend.hook_before_write(hook.tensor, observe)


def _tell_backward_microbatch(context: CaptureContext, call: Call) -> Callable[[Any], None]:
    def tell(grad: Any) -> None:
        context.clock.backward_microbatch = call.microbatch

    return context.containment.hook(f"the gradient of {call.fqn}", tell)


def _observe_gradient(
    context: CaptureContext, call: Call, role: Role, tensor: Any, slot: str
) -> Handle | None:
    backend = context.backend
    if not (backend.grad_enabled() and backend.requires_grad(tensor)) or backend.is_parameter(tensor):
        return None
    return backend.hook_gradient(tensor, _gradient_observer(context, call, role, slot))


def _gradient_observer(context: CaptureContext, call: Call, role: Role, slot: str) -> Callable[[Any], None]:
    """Return a function that records a gradient of this call, if it arrives in this step."""
    step = context.recorder.step

    def observe(grad: Any) -> None:
        if not context.clock.in_step or context.recorder.step != step:
            return
        context.clock.backward_microbatch = call.microbatch
        context.observe_call(call, Phase.DGRAD, role, grad, slot)

    return context.containment.hook(f"the gradient of {call.fqn}", observe)
