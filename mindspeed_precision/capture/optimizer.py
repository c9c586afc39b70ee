"""What the optimizer really did: reduced gradients, norm, hyperparameters as applied, states, parameters.

The optimizer that the loop calls is a chain of Megatron wrappers around the framework's optimizers. The outer
``step`` is seen by a patch on Megatron's classes, the inner one by the framework's own hooks: there, and only
there, the gradients are unscaled and clipped and the groups hold what is applied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_precision.capture.context import CaptureContext, active
from mindspeed_precision.capture.optimizer_members import inner_names, members, own_range, own_ranges, sharded
from mindspeed_precision.records import MOMENTUM, Phase, Role

_STATES = {
    "exp_avg": (Role.EXP_AVG, ""),
    "exp_avg_sq": (Role.EXP_AVG_SQ, ""),
    MOMENTUM: (Role.EXP_AVG, MOMENTUM),
}


def attach_optimizer(context: CaptureContext, optimizer: Any) -> list[Any]:
    """Hook every optimizer of the framework inside ``optimizer``; return the handles."""
    context.optimizer = optimizer
    backend = context.backend
    handles: list[Any] = []
    for member in members(optimizer):
        if backend.is_optimizer(member):
            hook = context.containment.hook
            before = hook("the optimizer's step", _before_step(context, member))
            after = hook("the optimizer's step", _after_step(context, member))
            handles += backend.hook_step(member, before, after)
    return handles


def observe_step(
    wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Record reduced gradients before, and grad norm and parameters after, the loop's ``optimizer.step()``.

    Wraps ``step(self)`` of Megatron's optimizers, which returns ``(successful, grad_norm, zeros)`` with the
    global norm before clipping. An optimizer inside the one that the loop calls is left to its own hooks.
    """
    context = active()
    if context is None or instance is not context.optimizer or not context.settings.optimizer:
        return wrapped(*args, **kwargs)
    observe_reduced_grads(context)
    result = wrapped(*args, **kwargs)
    grad_norm = result[1] if isinstance(result, tuple) and len(result) > 1 else None
    observe_grad_norm(context, grad_norm)
    observe_parameters(context, Phase.OPTIMIZER)
    return result


def observe_grad_norm(context: CaptureContext, grad_norm: Any) -> None:
    """Record the norm that the loop works with: a number or a one-element tensor; None is nothing."""
    if context.backend.is_tensor(grad_norm):
        norm = context.backend.detach(grad_norm)
        context.observe(Phase.CLIP, "grad_norm", Role.GRAD_NORM, norm)
    elif grad_norm is not None:
        context.observe_number(Phase.CLIP, "grad_norm", Role.GRAD_NORM, float(grad_norm))


def observe_reduced_grads(context: CaptureContext) -> None:
    """Record every parameter's gradient as the reductions left it; of a sharded one this rank's shard."""
    backend = context.backend
    for fqn, parameter in context.names.parameters:
        grad = backend.gradient(parameter)
        if grad is None or not backend.requires_grad(parameter):
            continue
        if not sharded(context.optimizer):
            context.observe(Phase.REDUCE, fqn, Role.REDUCED_GRAD, grad)
            continue
        span = own_range(context.optimizer, parameter)
        if span is not None:
            shard, slot = grad.view(-1)[span[0] : span[1]], f"{span[0]}:{span[1]}"
            context.observe(Phase.REDUCE, fqn, Role.REDUCED_GRAD, shard, slot=slot, elements=span)


def observe_parameters(context: CaptureContext, phase: Phase) -> None:
    """Record the parameters as the model will use them; of what is gathered later, this rank's own range."""
    own_alone = context.gathers_late and phase is Phase.OPTIMIZER and sharded(context.optimizer)
    for fqn, parameter in context.names.parameters:
        tensor, span = context.backend.detach(parameter), None
        if own_alone and context.backend.requires_grad(parameter):
            span = own_range(context.optimizer, parameter)
            if span is None:  # another rank's: what is here is a step old
                continue
            tensor = tensor.view(-1)[span[0] : span[1]]
        context.observe(phase, fqn, Role.PARAM, tensor, elements=span)


def _named(context: CaptureContext) -> tuple[dict[int, str], dict[str, tuple[int, int]]]:
    """Return what the inner optimizers update by name, and which ranges of it this rank has."""
    names, optimizer = context.names.parameters, context.optimizer
    return inner_names(context.backend, names, optimizer), own_ranges(names, optimizer)


def _before_step(context: CaptureContext, optimizer: Any) -> Callable[[], None]:
    def before() -> None:
        if not context.clock.in_step or not context.settings.optimizer:
            return
        if optimizer is context.optimizer:
            observe_reduced_grads(context)
        (names, ranges), gradients = _named(context), []
        for update in context.backend.updates(optimizer):
            fqn = names.get(id(update.updated), "")
            span = ranges.get(fqn)
            context.observe(Phase.CLIP, fqn, Role.MAIN_GRAD, update.gradient, slot="clipped", elements=span)
            gradients.append(update.gradient)
            for slot, value in update.hyperparameters.items():
                _observe_hyperparameter(context, fqn, slot, value)
        if gradients:
            slot = "clipped_local" if optimizer is context.optimizer else _slot_of(context, optimizer)
            norm = context.backend.norm(gradients)
            context.observe(Phase.CLIP, "grad_norm", Role.GRAD_NORM, norm, slot=slot)

    return before


def _slot_of(context: CaptureContext, optimizer: Any) -> str:
    inner = [m for m in members(context.optimizer) if context.backend.is_optimizer(m)]
    index = next((i for i, member in enumerate(inner) if member is optimizer), 0)
    return "clipped_local" if len(inner) == 1 else f"clipped_local.{index}"


def _observe_hyperparameter(context: CaptureContext, fqn: str, slot: str, value: Any) -> None:
    number = context.backend.number(value)
    if number is None:  # torch's step is a tensor, MindSpeed's an int: as wide as a number, and no waiting
        wide = context.backend.wide_scalar(value)
        context.observe(Phase.OPTIMIZER, fqn, Role.HYPERPARAMETER, wide, slot=slot)
    else:
        context.observe_number(Phase.OPTIMIZER, fqn, Role.HYPERPARAMETER, number, slot=slot)


def _after_step(context: CaptureContext, optimizer: Any) -> Callable[[], None]:
    def after() -> None:
        if not context.clock.in_step or not context.settings.optimizer:
            return
        names, ranges = _named(context)
        for update in context.backend.updates(optimizer):
            fqn = names.get(id(update.updated), "")
            for name, (role, slot) in _STATES.items():
                if name in update.states:
                    state, span = update.states[name], ranges.get(fqn)
                    context.observe(Phase.OPTIMIZER, fqn, role, state, slot=slot, elements=span)
            if id(update.updated) not in context.parameter_names:
                master = context.backend.detach(update.updated)
                span = ranges.get(fqn)
                context.observe(Phase.OPTIMIZER, fqn, Role.MASTER_PARAM, master, elements=span)
        if optimizer is context.optimizer:
            observe_parameters(context, Phase.OPTIMIZER)

    return after
