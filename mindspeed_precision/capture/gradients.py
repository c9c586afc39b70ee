"""The gradient of every parameter as it arrives, and ``main_grad`` before and after it is added.

The backend's hook sees dW of one microbatch alone, summed over the uses of a tied weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_precision.capture.context import CaptureContext, active
from mindspeed_precision.records import Phase, Role


def attach_gradients(context: CaptureContext, *, overlapping: bool) -> list[Any]:
    """Hook every trainable parameter; return what must be kept alive.

    Args:
        context: the run.
        overlapping: the DDP reduces gradients while the backward runs. ``main_grad`` after accumulation is
            then taken by ``observe_grad_ready``, before a reduction can start to write into it.
    """
    kept: list[Any] = []
    backend = context.backend
    for fqn, parameter in context.names.parameters:
        if backend.requires_grad(parameter):
            where, hook = f"the gradient of {fqn}", context.containment.hook
            before = hook(where, _before(context, fqn, parameter))
            after = None if overlapping else hook(where, _after(context, fqn, parameter))
            kept += backend.hook_accumulation(parameter, before, after)
    return kept


def detach(kept: list[Any]) -> None:
    """Remove what an ``attach_*`` function returned."""
    for item in kept:
        if hasattr(item, "remove"):
            item.remove()


def gradient_role(fqn: str) -> Role:
    """Return the role of the gradient of parameter ``fqn``."""
    return Role.BGRAD if fqn.rpartition(".")[2] == "bias" else Role.WGRAD


def _added_in_the_gemm(parameter: Any) -> bool:
    """Tell whether a fused GEMM has added dW already, so that what autograd carries is a placeholder."""
    return bool(getattr(parameter, "grad_added_to_main_grad", False)) and not getattr(
        parameter, "zero_out_wgrad", False
    )


def _before(context: CaptureContext, fqn: str, parameter: Any) -> Callable[[Any], None]:
    role = gradient_role(fqn)

    def before(grad: Any) -> None:
        if not context.clock.in_step or _added_in_the_gemm(parameter):
            return
        microbatch = context.clock.backward_microbatch
        context.observe(Phase.WGRAD, fqn, role, grad, microbatch=microbatch)
        context.coverage.saw_wgrad(fqn, microbatch)
        accumulated = context.backend.gradient(parameter)
        if accumulated is not None:
            observe_main_grad(context, fqn, accumulated, "before", microbatch)
            if context.settings.verify_sums and context.recorder.recording:
                copies = context.backend.copy(accumulated), context.backend.copy(grad)
                context.waiting_sums[fqn] = copies  # until the sum is there, which is soon

    return before


def _after(context: CaptureContext, fqn: str, parameter: Any) -> Callable[[], None]:
    def after() -> None:
        if not context.clock.in_step or _added_in_the_gemm(parameter):
            return
        accumulated = context.backend.gradient(parameter)
        if accumulated is not None:
            observe_main_grad(context, fqn, accumulated, "after", context.clock.backward_microbatch)

    return after


def observe_main_grad(
    context: CaptureContext, fqn: str, accumulated: Any, slot: str, microbatch: int
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
    copies = context.waiting_sums.pop(fqn, None) if slot == "after" else None
    if copies is not None:
        wrong = context.backend.not_the_sum(accumulated, *copies)
        context.observe(Phase.ACCUMULATE, fqn, Role.RESIDUAL, wrong, slot="sum", microbatch=microbatch)


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
