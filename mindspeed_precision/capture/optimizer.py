"""What the optimizer really did: reduced gradients, norm, hyperparameters as applied, states, parameters.

The optimizer that the loop calls is a chain of Megatron wrappers around ``torch.optim`` optimizers. The outer
``step`` is seen by a patch on Megatron's classes, the inner one by ``torch.optim``'s own step hooks: there,
and only there, the gradients are unscaled and clipped and the groups hold what is applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from mindspeed_precision.capture.context import CaptureContext, active
from mindspeed_precision.records import Phase, Role

HYPERPARAMETERS = ("lr", "weight_decay", "eps", "betas", "momentum", "step", "wd_mult", "lr_mult")
_STATES = {"exp_avg": Role.EXP_AVG, "exp_avg_sq": Role.EXP_AVG_SQ}


def members(optimizer: Any) -> list[Any]:
    """Return ``optimizer`` and every optimizer inside it once, outermost first; nothing for None."""
    found: dict[int, Any] = {}
    waiting = [optimizer]
    while waiting:
        member = waiting.pop(0)
        if member is None or id(member) in found:
            continue
        found[id(member)] = member
        if hasattr(member, "chained_optimizers"):  # whose own `.optimizer` is refused when there are several
            waiting += member.chained_optimizers
            continue
        inner = getattr(member, "optimizer", None)
        waiting += [inner] if hasattr(inner, "param_groups") else []
    return list(found.values())


def attach_optimizer(context: CaptureContext, optimizer: Any) -> list[Any]:
    """Hook every ``torch.optim`` optimizer inside ``optimizer``; return the handles."""
    context.optimizer = optimizer
    handles: list[Any] = []
    for member in members(optimizer):
        if isinstance(member, torch.optim.Optimizer):
            handles.append(member.register_step_pre_hook(_before_step(context)))
            handles.append(member.register_step_post_hook(_after_step(context)))
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
    if isinstance(grad_norm, torch.Tensor):
        context.observe(Phase.CLIP, "grad_norm", Role.GRAD_NORM, grad_norm.detach())
    elif grad_norm is not None:
        context.observe_number(Phase.CLIP, "grad_norm", Role.GRAD_NORM, float(grad_norm))
    observe_parameters(context, Phase.OPTIMIZER)
    return result


def observe_reduced_grads(context: CaptureContext) -> None:
    """Record every parameter's gradient as the reductions left it; of a sharded one this rank's shard."""
    for fqn, parameter in context.names.parameters:
        grad = getattr(parameter, "main_grad", parameter.grad)
        if grad is None or not parameter.requires_grad:
            continue
        for slot, shard in _own_shard(context.optimizer, parameter, grad):
            context.observe(Phase.REDUCE, fqn, Role.REDUCED_GRAD, shard, slot=slot)


def observe_parameters(context: CaptureContext, phase: Phase) -> None:
    """Record the parameters as the model will use them."""
    for fqn, parameter in context.names.parameters:
        context.observe(phase, fqn, Role.PARAM, parameter.detach())


def _own_shard(
    optimizer: Any, parameter: torch.nn.Parameter, grad: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the part of ``grad`` that is valid here: all of it, or the range of a distributed optimizer."""
    for member in members(optimizer):
        ranges = getattr(member, "model_param_gbuf_map", None)
        if ranges is None:
            continue
        if parameter not in ranges:
            continue
        try:
            span = member._get_model_param_range_map(parameter)["param"]
        except KeyError:  # the bucket has the parameter, another rank owns it
            return
        yield f"{span.start}:{span.end}", grad.view(-1)[span.start : span.end]
        return
    if not any(hasattr(member, "model_param_gbuf_map") for member in members(optimizer)):
        yield "", grad


def _inner_names(context: CaptureContext) -> dict[int, str]:
    """Map ``id`` of what the inner optimizers update (parameters, copies, shards) to the parameter's fqn."""
    names = dict(context.parameter_names)
    for _, parameter in context.names.parameters:
        copy = getattr(parameter, "main_param", None)
        if isinstance(copy, torch.Tensor):
            names[id(copy)] = context.parameter_names[id(parameter)]
    for member in members(context.optimizer):
        for models, copies in (
            ("float16_groups", "fp32_from_float16_groups"),
            ("model_float16_groups", "shard_fp32_from_float16_groups"),
            ("model_fp32_groups", "shard_fp32_groups"),
        ):
            for group, shadow in zip(getattr(member, models, ()), getattr(member, copies, ()), strict=False):
                for parameter, copy in zip(group, shadow, strict=False):
                    if id(parameter) in context.parameter_names and copy is not None:
                        names[id(copy)] = context.parameter_names[id(parameter)]
    return names


def _updated(context: CaptureContext, optimizer: Any) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
    """Yield ``(fqn, what is updated, its group)`` of everything that has a gradient."""
    names = _inner_names(context)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if _gradient(parameter) is not None:
                yield names.get(id(parameter), ""), parameter, group


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    grad = parameter.grad
    return grad if grad is not None else getattr(parameter, "decoupled_grad", None)


def _before_step(context: CaptureContext) -> Callable[..., None]:
    def before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not context.clock.in_step or not context.settings.optimizer:
            return
        if optimizer is context.optimizer:
            observe_reduced_grads(context)
        norms = []
        for fqn, parameter, group in _updated(context, optimizer):
            grad = _gradient(parameter)
            assert grad is not None
            context.observe(Phase.CLIP, fqn, Role.MAIN_GRAD, grad, slot="clipped")
            norms.append(_norm(grad.detach()))
            _observe_hyperparameters(context, fqn, group, optimizer.state.get(parameter, {}))
        if norms:
            # parameters may lie on several devices, and in several types
            wide = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
            norm = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device, wide) for n in norms]))
            slot = "clipped_local" if optimizer is context.optimizer else _slot_of(context, optimizer)
            context.observe(Phase.CLIP, "grad_norm", Role.GRAD_NORM, norm, slot=slot)

    return before


def _norm(grad: torch.Tensor) -> torch.Tensor:
    """Return the 2-norm of a gradient of any layout and type, in float32, or float64 for float64."""
    dense = grad.coalesce().values() if grad.layout is torch.sparse_coo else grad
    real = torch.view_as_real(dense) if dense.is_complex() else dense
    wide = torch.float64 if real.dtype is torch.float64 else torch.float32
    return torch.linalg.vector_norm(real, dtype=wide)


def _slot_of(context: CaptureContext, optimizer: Any) -> str:
    inner = [m for m in members(context.optimizer) if isinstance(m, torch.optim.Optimizer)]
    index = next((i for i, member in enumerate(inner) if member is optimizer), 0)
    return "clipped_local" if len(inner) == 1 else f"clipped_local.{index}"


def _observe_hyperparameters(
    context: CaptureContext, fqn: str, group: dict[str, Any], state: dict[str, Any]
) -> None:
    for name in HYPERPARAMETERS:
        value = group.get(name, state.get(name))
        if name == "step" and value is None:
            value = 0  # no step was made with this parameter yet
        if value is None:
            continue
        numbers = {"beta1": value[0], "beta2": value[1]} if name == "betas" else {name: value}
        for slot, number in numbers.items():
            if isinstance(number, torch.Tensor) and number.device.type != "cpu":
                # as wide as a number: torch's step is a tensor, MindSpeed's an int
                wide = number.detach().reshape(()).to(torch.float64)
                context.observe(Phase.OPTIMIZER, fqn, Role.HYPERPARAMETER, wide, slot=slot)
            else:
                context.observe_number(Phase.OPTIMIZER, fqn, Role.HYPERPARAMETER, float(number), slot=slot)


def _after_step(context: CaptureContext) -> Callable[..., None]:
    def after(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not context.clock.in_step or not context.settings.optimizer:
            return
        for fqn, parameter, _ in _updated(context, optimizer):
            for name, role in _STATES.items():
                state = optimizer.state.get(parameter, {}).get(name)
                if isinstance(state, torch.Tensor):
                    context.observe(Phase.OPTIMIZER, fqn, role, state)
            if id(parameter) not in context.parameter_names:
                context.observe(Phase.OPTIMIZER, fqn, Role.MASTER_PARAM, parameter.detach())
        if optimizer is context.optimizer:
            observe_parameters(context, Phase.OPTIMIZER)

    return after
