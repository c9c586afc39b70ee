"""dW inside the parallel linears: the GEMM, its operands as it saw them, and what it added to.

Generic dumpers miss dW: it is no module's input or output, with gradient accumulation fusion it never exists
as a tensor, and the autograd engine is then given uninitialised memory in its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mindspeed_precision.capture.clock import Call
from mindspeed_precision.capture.containment import Wrapper
from mindspeed_precision.capture.context import CaptureContext, active
from mindspeed_precision.capture.gradients import observe_main_grad
from mindspeed_precision.records import FUSED_DIFFERENCE, Phase, Role

_running = threading.local()


def remember_linear(
    wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Note on ``ctx`` which module this linear is (a tied weight alone does not tell) and its weight.

    Wraps ``forward(ctx, input, weight, …)`` of a linear's autograd function. Backward must not ask ``ctx``
    for its saved tensors on our behalf: under a checkpoint of torch they can be unpacked once only.
    """
    output = wrapped(*args, **kwargs)
    context = active()
    if context is not None and context.clock.current is not None:
        weight = args[2] if len(args) > 2 else kwargs["weight"]
        args[0].precision_call = context.clock.current
        args[0].precision_weight = _Weight(
            shape=tuple(weight.shape),
            address=context.backend.address(weight),
            trained=args[0].needs_input_grad[1],
        )
    return output


@dataclass(frozen=True, kw_only=True)
class _Weight:
    """What tells dW's GEMM from dgrad's, without keeping the weight.

    Attributes:
        shape: ``[out, in]`` of this rank's shard.
        address: where it lies.
        trained: whether its gradient is wanted.
    """

    shape: tuple[int, ...]
    address: int
    trained: bool


def observe_backward(
    wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Record the wgrad GEMM of one parallel linear and pass every gradient through.

    Wraps ``backward(ctx, grad_output)``, which returns ``(grad_input, grad_weight, grad_bias, …)`` with
    ``grad_weight`` ``[out, in]`` of this rank's shard. Under fusion it is a placeholder and is not recorded:
    see ``observe_fused_gemm``.
    """
    context, call = active(), getattr(args[0], "precision_call", None)
    if context is None or call is None or not context.settings.wgrad:
        return wrapped(*args, **kwargs)
    weight: _Weight = args[0].precision_weight
    fused = bool(getattr(args[0], "gradient_accumulation_fusion", False))
    context.clock.backward_microbatch = call.microbatch
    witness = _GemmWitness(context, call, weight)
    _running.call, _running.fused_gemms = call, 0
    try:
        with context.backend.watch_products(witness.look_safely):
            grads = wrapped(*args, **kwargs)
        if weight.trained and not (_running.fused_gemms if fused else witness.gemms):
            _report_unseen(context, call, fused, args[0])
    finally:
        _running.call = None
    if not fused and not witness.gemms and grads[1] is not None:
        context.observe_call(call, Phase.WGRAD, Role.WGRAD, grads[1])
    if len(grads) > 2 and context.backend.is_tensor(grads[2]):
        context.observe_call(call, Phase.WGRAD, Role.BGRAD, grads[2])
    return grads


def _report_unseen(context: CaptureContext, call: Call, fused: bool, ctx: Any) -> None:
    deferred = fused and getattr(ctx, "grad_output_buffer", None) is not None
    if not deferred:
        context.coverage.saw_no_gemm(call.fqn, context.recorder.step)


class _GemmWitness:
    """Looks at the matrix products that one backward calls and records the one that makes dW ``[out, in]``.

    The product with the weight itself is dgrad. Nothing is changed: the call goes on as it came.
    """

    def __init__(self, context: CaptureContext, call: Call, weight: _Weight) -> None:
        self._context, self._call, self._weight = context, call, weight
        self.gemms = 0

    def look_safely(self, left: Any, right: Any, compute: Callable[[], Any]) -> Any:
        """Do as ``look`` does; a failure of ours stays out of the training."""
        where = f"a matrix product of {self._call.fqn}"
        observer: Wrapper = lambda once, instance, args, kwargs: self.look(left, right, once)  # noqa: E731
        return self._context.containment.call(where, observer, compute, None, (), {})

    def look(self, left: Any, right: Any, compute: Callable[[], Any]) -> Any:
        """See the product of ``left`` and ``right``; return it."""
        if not self._makes_wgrad(left, right):
            return compute()
        observe_operands(self._context, self._call, left.t(), right)
        wgrad = compute()
        self._context.observe_call(self._call, Phase.WGRAD, Role.WGRAD, wgrad)
        verify_product(self._context, self._call, wgrad, left.t(), right)
        self.gemms += 1
        return wgrad

    def _makes_wgrad(self, left: Any, right: Any) -> bool:
        return (
            len(left.shape) == len(right.shape) == 2
            and (left.shape[0], right.shape[1]) == self._weight.shape
            and self._context.backend.address(right) != self._weight.address
        )


def observe_operands(context: CaptureContext, call: Call, grad_output: Any, total_input: Any) -> None:
    """Record the operands of ``grad_output.t() @ total_input``: ``[tokens, out]`` and ``[tokens, in]``.

    The layouts are those that the GEMM saw: a ``grad_output.t().contiguous()`` operand shows here as a
    ``grad_output`` of stride ``(1, tokens)``.
    """
    context.observe_call(call, Phase.WGRAD, Role.GRAD_OUTPUT, grad_output)
    context.observe_call(call, Phase.WGRAD, Role.INPUT, total_input)


def verify_product(
    context: CaptureContext,
    call: Call,
    wgrad: Any,
    grad_output: Any,
    total_input: Any,
    sides: tuple[Any, ...] = (),
) -> None:
    """Record how far dW is from the product of its operands, where that is asked for.

    Args:
        context: the run.
        call: of the linear.
        wgrad: ``[out, in]``; under fusion a difference.
        grad_output: ``[tokens, out]``.
        total_input: ``[tokens, in]``.
        sides: ``main_grad`` after and before, whose difference ``wgrad`` is.
    """
    if context.settings.verify_products and context.recorder.recording:
        left = grad_output.reshape(-1, grad_output.shape[-1])
        right = total_input.reshape(-1, total_input.shape[-1])
        found = context.backend.product_excess(wgrad, left, right, sides)
        context.observe_call(call, Phase.WGRAD, Role.RESIDUAL, found, "product")


def observe_fused_gemm(
    wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Record a GEMM that adds dW straight into ``main_grad``: operands, ``main_grad`` before and after.

    Wraps ``(total_input [tokens, in], grad_output [tokens, out], main_grad [out, in])``, in place on it.
    dW itself never exists; what is recorded as ``wgrad`` is the difference of ``main_grad``, which is dW
    exactly where ``main_grad`` was zero (the first microbatch of a step) and rounded otherwise; its ``note``
    says so.
    """
    context = active()
    if context is None or not context.settings.wgrad or len(args) < 3:
        return wrapped(*args, **kwargs)
    total_input, grad_output, main_grad = args[:3]
    parameter = _parameter_of(context, main_grad)
    call = getattr(_running, "call", None) or Call(
        fqn=parameter.rpartition(".")[0], microbatch=context.clock.microbatch, occurrence=0, recomputed=False
    )
    observe_operands(context, call, grad_output.reshape(-1, grad_output.shape[-1]), total_input)
    observe_main_grad(context, parameter, main_grad, "before", call.microbatch)
    before = context.backend.copy(main_grad)
    result = wrapped(*args, **kwargs)
    added = context.backend.difference(main_grad, before)
    context.observe_call(call, Phase.WGRAD, Role.WGRAD, added, note=FUSED_DIFFERENCE)
    verify_product(context, call, added, grad_output, total_input, (main_grad, before))
    observe_main_grad(context, parameter, main_grad, "after", call.microbatch)
    context.coverage.saw_wgrad(parameter, call.microbatch)
    _running.fused_gemms = getattr(_running, "fused_gemms", 0) + 1
    return result


def _parameter_of(context: CaptureContext, main_grad: Any) -> str:
    """Return the fqn of the parameter whose ``main_grad`` this is, found by where it lies."""
    address = context.backend.address
    for fqn, parameter in context.names.parameters:
        own = getattr(parameter, "main_grad", None)
        if own is not None and address(own) == address(main_grad) and own.shape == main_grad.shape:
            return fqn
    return ""
