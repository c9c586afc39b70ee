"""The gradient of every parameter as it arrives, and ``main_grad`` before and after it is added.

Hooks sit on the parameter's ``AccumulateGrad`` node: its pre-hook sees dW of this microbatch alone (summed
over the uses of a tied weight), its post-hooks run in the order in which they were registered, so ours runs
after the one with which Megatron's DDP adds dW to ``main_grad``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mindspeed_precision.capture.context import CaptureContext, active
from mindspeed_precision.records import Phase, Role


def attach_gradients(context: CaptureContext, *, overlapping: bool) -> list[Any]:
    """Hook every trainable parameter; return the handles and the nodes, which must be kept alive.

    Args:
        context: the run.
        overlapping: the DDP reduces gradients while the backward runs. ``main_grad`` after accumulation is
            then taken by ``observe_grad_ready``, before a reduction can start to write into it.
    """
    kept: list[Any] = []
    for fqn, parameter in context.names.parameters:
        if not parameter.requires_grad:
            continue
        with torch.enable_grad():
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        kept.append(node)
        kept.append(node.register_prehook(_before(context, fqn, parameter)))
        if not overlapping:
            kept.append(node.register_hook(_after(context, fqn, parameter)))
    return kept


def detach(kept: list[Any]) -> None:
    """Remove what an ``attach_*`` function returned."""
    for item in kept:
        if hasattr(item, "remove"):
            item.remove()


def gradient_role(fqn: str) -> Role:
    """Return the role of the gradient of parameter ``fqn``."""
    return Role.BGRAD if fqn.rpartition(".")[2] == "bias" else Role.WGRAD


def _added_in_the_gemm(parameter: nn.Parameter) -> bool:
    """Tell whether a fused GEMM has added dW already, so that what autograd carries is a placeholder."""
    return bool(getattr(parameter, "grad_added_to_main_grad", False)) and not getattr(
        parameter, "zero_out_wgrad", False
    )


def _before(context: CaptureContext, fqn: str, parameter: nn.Parameter) -> Callable[..., None]:
    role = gradient_role(fqn)

    def before(grads: tuple[torch.Tensor | None, ...]) -> None:
        grad = grads[0]
        if not context.clock.in_step or grad is None or _added_in_the_gemm(parameter):
            return
        microbatch = context.clock.backward_microbatch
        context.observe(Phase.WGRAD, fqn, role, grad, microbatch=microbatch)
        context.coverage.saw_wgrad(fqn, microbatch)
        accumulated = getattr(parameter, "main_grad", parameter.grad)
        if accumulated is not None:
            observe_main_grad(context, fqn, accumulated, "before", microbatch)

    return before


def _after(context: CaptureContext, fqn: str, parameter: nn.Parameter) -> Callable[..., None]:
    def after(*_: Any) -> None:
        if not context.clock.in_step or _added_in_the_gemm(parameter):
            return
        accumulated = getattr(parameter, "main_grad", parameter.grad)
        if accumulated is not None:
            observe_main_grad(context, fqn, accumulated, "after", context.clock.backward_microbatch)

    return after


def observe_main_grad(
    context: CaptureContext, fqn: str, accumulated: torch.Tensor, slot: str, microbatch: int
) -> None:
    """Record ``main_grad`` (or ``.grad``) of a parameter ``before`` or ``after`` one accumulation."""
    clock = context.clock
    number = clock.begin_accumulation if slot == "before" else clock.end_accumulation
    context.observe(
        Phase.ACCUMULATE,
        fqn,
        Role.MAIN_GRAD,
        accumulated,
        slot=slot,
        microbatch=microbatch,
        occurrence=number(fqn, microbatch),
    )


def observe_grad_ready(
    wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Record ``main_grad`` after accumulation, before the overlapped reduction of its bucket can start.

    Wraps ``register_grad_ready(self, param, …)``.
    """
    context = active()
    parameter = args[0] if args else kwargs["param"]
    if context is not None and context.settings.wgrad and not _added_in_the_gemm(parameter):
        fqn = context.parameter_names.get(id(parameter))
        if fqn is not None:
            microbatch = context.clock.backward_microbatch
            observe_main_grad(context, fqn, parameter.main_grad, "after", microbatch)
    return wrapped(*args, **kwargs)
