"""What Megatron asks of ``cuda`` happens on the CPU, as ``transfer_to_npu`` does it for an NPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from mindspeed_precision.testing.piece import Piece

CPU = torch.device("cpu")

FACTORIES = (
    *("tensor", "as_tensor", "empty", "zeros", "ones", "full", "rand", "randn", "randint", "randperm"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("arange", "linspace", "logspace", "eye", "empty_strided", "tril_indices", "triu_indices"),
)
TENSOR_FACTORIES = ("new_tensor", "new_empty", "new_zeros", "new_ones", "new_full")


def is_accelerator(device: object) -> bool:
    """Tell whether ``device`` is an accelerator: ``"cuda:0"``, ``torch.device("cuda")`` or a bare index."""
    if isinstance(device, torch.device):
        return bool(device.type == "cuda")
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _redirect_keywords(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if is_accelerator(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return on_cpu


def _redirect_first_argument(method: Callable[..., Any]) -> Callable[..., Any]:
    redirected = _redirect_keywords(method)

    @functools.wraps(method)
    def on_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and is_accelerator(args[0]):
            args = (CPU, *args[1:])
        return redirected(self, *args, **kwargs)

    return on_cpu


def _redirect_factories() -> None:
    for owner, names in ((torch, FACTORIES), (torch.Tensor, TENSOR_FACTORIES)):
        for name in names:
            setattr(owner, name, _redirect_keywords(getattr(owner, name)))


def _redirect_moves() -> None:
    def cuda(self: Any, *_: Any, **__: Any) -> Any:
        return self

    def pin_memory(self: Any, *_: Any, **__: Any) -> Any:
        return self

    for owner in (torch.Tensor, torch.nn.Module):
        owner.cuda = cuda
        owner.to = _redirect_first_argument(owner.to)
    torch.Tensor.pin_memory = pin_memory


def _name_cuda_types() -> None:
    original = torch.Tensor.type

    @functools.wraps(original)
    def type_as_on_cuda(self: Any, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            return original(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original(self, dtype, non_blocking, **kwargs)

    torch.Tensor.type = type_as_on_cuda


PIECES = (
    Piece(
        name="factory_device",
        why="Megatron allocates with device=torch.cuda.current_device() or device='cuda'; the keyword "
        "becomes the CPU, and pin_memory is dropped.",
        error_without="RuntimeError: Could not run 'aten::empty.memory_format' with arguments from the "
        "'CUDA' backend",
        when="every run",
        apply=_redirect_factories,
    ),
    Piece(
        name="tensor_moves",
        why="Models and batches are moved with .cuda(), .to('cuda') and .pin_memory(); here they are "
        "where they belong.",
        error_without="Invalid device, must be cuda device",
        when="every run",
        apply=_redirect_moves,
    ),
    Piece(
        name="tensor_type_names",
        why="The optimizers and clip_grads compare Tensor.type() with names such as "
        "'torch.cuda.FloatTensor'.",
        error_without="AssertionError in clip_grads, or: Wrapped parameters must be one of "
        "torch.cuda.FloatTensor",
        when="every run",
        apply=_name_cuda_types,
    ),
)
