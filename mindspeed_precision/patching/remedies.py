"""Remedies: wrappers that change one numerical decision on purpose (``patches/remedies.yaml``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_precision.errors import PatchError


def wgrad_contiguous_operands(
    wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Compute dW of one parallel linear from a materialised transpose: ``grad_output.t().contiguous()``.

    ``backward(ctx, grad_output)`` computes dW ``[O, I]`` as ``grad_output.t()`` ``[O, N]``, stride (1, O),
    times the input ``[N, I]``; only the layout of the left operand changes, to stride ``(N, 1)``.

    Raises:
        PatchError: dW is computed by a fused kernel, which no remedy can reach.
    """
    return _backward(lambda left: left.contiguous(), "wgrad_contiguous_operands", wrapped, args, kwargs)


def wgrad_transposed_operands(
    wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Compute dW of one parallel linear from a transposed view: the inverse of `wgrad_contiguous_operands`.

    The left operand ``[O, N]`` of dW's GEMM gets stride ``(1, O)``: a view of a contiguous ``grad_output``.

    Raises:
        PatchError: dW is computed by a fused kernel, which no remedy can reach.
    """
    return _backward(
        lambda left: left.t().contiguous().t(), "wgrad_transposed_operands", wrapped, args, kwargs
    )


def wgrad_contiguous(
    wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return dW ``[O, I]`` of one parallel linear contiguous: the same numbers, laid out in rows.

    ``backward(ctx, grad_output)`` returns ``(grad_input, grad_weight, ...)``. On torch this changes no bit;
    on a backend that accumulates gradients without regard to strides it makes the sum right. Only
    ``contiguous`` is called on what is returned, so it acts wherever the framework's tensors have it.

    Raises:
        PatchError: dW is computed by a fused kernel, which no remedy can reach.
    """
    gradients = wrapped(*args, **kwargs)
    context = args[0] if args else kwargs.get("ctx")
    if getattr(context, "gradient_accumulation_fusion", False):
        raise _fused("wgrad_contiguous")
    if len(gradients) < 2 or gradients[1] is None:
        return gradients
    return (gradients[0], gradients[1].contiguous(), *gradients[2:])


def split_by_slices(
    wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Split a tensor by ``narrow``, whose backward reads the strides of the gradients that arrive.

    Stands for ``split(tensor, split_size_or_sections, dim=0)``; the parts are the same views.
    """
    return _split(*args, **kwargs)


def _split(tensor: Any, split_size_or_sections: Any, dim: int = 0) -> tuple[Any, ...]:
    size, lengths = tensor.shape[dim], split_size_or_sections
    if isinstance(lengths, int):
        lengths = [min(lengths, size - start) for start in range(0, size, lengths)]
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    return tuple(tensor.narrow(dim, start, length) for start, length in zip(starts, lengths, strict=True))


def _fused(name: str) -> PatchError:
    return PatchError(
        f"remedy {name} cannot act: dW is added to main_grad by a fused kernel, not by a matmul",
        where="LinearWithGradAccumulationAndAsyncCommunication.backward",
        remedy="train with --no-gradient-accumulation-fusion on both sides",
    )


def _backward(
    relayout: Callable[[Any], Any],
    name: str,
    wrapped: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    gemms, mode = _transposed_gemm_mode(relayout)
    with mode:
        gradients = wrapped(*args, **kwargs)
    context = args[0] if args else kwargs.get("ctx")
    if not gemms and getattr(context, "gradient_accumulation_fusion", False):
        raise _fused(name)
    return gradients


def _transposed_gemm_mode(relayout: Callable[[Any], Any]) -> tuple[list[str], Any]:
    """Return a torch function mode that changes the layout of a GEMM's left operand if a transpose made it.

    dgrad's left operand is ``grad_output`` itself, so only dW's GEMM matches, whatever the shapes are.

    Returns:
        The names of the GEMMs met so far, filled while the mode is active; the mode.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    tensor = torch.Tensor
    transposes = {
        tensor.t, torch.t, tensor.transpose, torch.transpose, tensor.permute, torch.permute,
        tensor.T.__get__, tensor.mT.__get__,
    }  # fmt: skip
    copies = {tensor.contiguous, tensor.clone, torch.clone}
    left_operand = {
        **dict.fromkeys((tensor.matmul, torch.matmul, tensor.__matmul__, tensor.mm, torch.mm), 0),
        **dict.fromkeys((tensor.addmm, torch.addmm, tensor.addmm_), 1),
    }
    transposed: dict[int, Any] = {}  # by id; holds the tensors, so that no id is used again meanwhile
    gemms: list[str] = []

    class TransposedGemm(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            place = left_operand.get(func)
            if place is not None and len(args) > place and id(args[place]) in transposed:
                gemms.append(func.__name__)
                args = (*args[:place], relayout(args[place]), *args[place + 1 :])
            result = func(*args, **(kwargs or {}))
            if args and (id(args[0]) in transposed if func in copies else func in transposes):
                transposed[id(result)] = result
            return result

    return gemms, TransposedGemm()
