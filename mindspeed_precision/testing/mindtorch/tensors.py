"""Tensors: methods that return something else than torch's, and the device that is always the CPU."""

from __future__ import annotations

import functools
from typing import Any

from mindspeed_precision.testing.mindtorch.piece import CompatPiece, Mends, load


def _torch() -> Any:
    return load("mindtorch")


def _copy_contiguous() -> None:
    tensor = _torch().Tensor
    native = tensor._mindspeed_precision_native_contiguous

    def contiguous(self: Any, memory_format: Any = None) -> Any:
        return self if self.is_contiguous() else native(self)

    tensor.contiguous = contiguous


def _copy_whole_tensors() -> None:
    def inplace_copy(target: Any, value: Any) -> Any:
        if tuple(value.shape) != tuple(target.shape):
            value = _torch().broadcast_to(value, tuple(target.shape))
        base = getattr(target, "_base", None)
        if base is not None:
            base.assign_value(value)
        required = target._requires_grad
        target.assign_value(value)
        if required and not target._requires_grad:
            target._requires_grad = True
        return target

    load("mindtorch._apis.cpu").inplace_copy = inplace_copy


def _name_no_base() -> None:
    _torch().Tensor._base = property(lambda self: None, lambda self, value: None)


def _stay_on_the_tape() -> None:
    tensor = _torch().Tensor
    original = tensor._move_to

    @functools.wraps(original)
    def move_to(self: Any, device: Any, non_blocking: bool = False) -> Any:
        return self if device.type == "cpu" else original(self, device, non_blocking)

    tensor._move_to = move_to


def _order_scales() -> None:
    torch = _torch()

    def baddbmm(input: Any, batch1: Any, batch2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
        product = torch.bmm(batch1, batch2)
        product = product if alpha == 1 else product * alpha
        return product if beta == 0 else product + input * beta

    torch.baddbmm = torch.ops.baddbmm = baddbmm


def _take_norms_of_whole_tensors() -> None:
    backend = load("mindtorch._apis.cpu")
    original = backend.linalg_vector_norm

    @functools.wraps(original)
    def linalg_vector_norm(
        x: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None
    ) -> Any:
        if dim is not None or float(ord) != 2.0:
            return original(x, ord, dim, keepdim, dtype)
        wide = x if dtype is None else x.to(dtype)
        return _torch().sqrt((wide * wide).sum())

    backend.linalg_vector_norm = linalg_vector_norm


def _keep_every_digit() -> None:
    def as_float(self: Any) -> float:
        return float(self.item())

    _torch().Tensor.__float__ = as_float


def _always_on_cpu() -> None:
    torch = _torch()
    device_class = load("mindtorch._C").device
    original = device_class.__init__

    @functools.wraps(original)
    def init(self: Any, type: Any = None, index: Any = None) -> None:
        original(self, type, index)
        if self.type == "cuda":
            self.type, self.index = "cpu", None

    device_class.__init__ = init
    cpu = torch.device("cpu")

    def device(self: Any) -> Any:
        return getattr(self, "__dict__", {}).get("_device", cpu)

    torch.Tensor.device = property(device)


PIECES = (
    CompatPiece(
        name="contiguous",
        mends=Mends.MINDTORCH,
        changes=("Tensor.contiguous",),
        why="mindtorch's contiguous returns its input as it is, strided or not. MindSpore's own copies.",
        error_without="silent: a view stays a view, and operations that ignore strides read the wrong "
        "elements",
        when="every run",
        apply=_copy_contiguous,
    ),
    CompatPiece(
        name="whole_copies",
        mends=Mends.MINDTORCH,
        changes=("mindtorch._apis.cpu.inplace_copy",),
        why="copy_ writes to a _base that is None, and forgets that the target requires a gradient.",
        error_without="AttributeError: 'NoneType' object has no attribute 'assign_value'",
        when="every run",
        apply=_copy_whole_tensors,
    ),
    CompatPiece(
        name="no_base",
        mends=Mends.MINDTORCH,
        changes=("Tensor._base",),
        why="mindtorch sets _base only on what was indexed; megatron-core asks every tensor for it, and "
        "takes None for 'no view'.",
        error_without="AttributeError: 'Tensor' object has no attribute '_base'",
        when="every run",
        apply=_name_no_base,
    ),
    CompatPiece(
        name="moves_stay_on_tape",
        mends=Mends.MINDTORCH,
        changes=("Tensor._move_to",),
        why="to('cpu') goes through numpy and cuts the tape; here a tensor is where it belongs.",
        error_without="silent: no gradient beyond the move",
        when="every run",
        apply=_stay_on_the_tape,
    ),
    CompatPiece(
        name="baddbmm",
        mends=Mends.MINDTORCH,
        changes=("torch.baddbmm", "torch.ops.baddbmm"),
        why="mindtorch hands beta and alpha over in the wrong order: baddbmm(beta=0, alpha=a) returns a * "
        "input. Attention scores of the local implementation are computed with it.",
        error_without="silent: attention scores of an uninitialised buffer",
        when="every run",
        apply=_order_scales,
    ),
    CompatPiece(
        name="norms",
        mends=Mends.MINDTORCH,
        changes=("mindtorch._apis.cpu.linalg_vector_norm",),
        why="The 2-norm of a whole tensor (dim=None) is refused; the norm of the gradients is made of them.",
        error_without="TypeError: For 'LpNorm', the type of 'axis' should be one of",
        when="every run that clips",
        apply=_take_norms_of_whole_tensors,
    ),
    CompatPiece(
        name="float_digits",
        mends=Mends.MINDTORCH,
        changes=("Tensor.__float__",),
        why="float(tensor) rounds to five decimals. The norm by which gradients are clipped, and every "
        "loss that is logged, go through it.",
        error_without="silent: numbers are off by up to 5e-6",
        when="every run",
        apply=_keep_every_digit,
    ),
    CompatPiece(
        name="cuda_is_cpu",
        mends=Mends.MEGATRON,
        changes=("torch.device", "Tensor.device"),
        why="Megatron allocates and moves with 'cuda'; the device named so is the CPU here, and a tensor "
        "that MindSpore made itself says that it is there too.",
        error_without="RuntimeError: Not found op",
        when="every run",
        apply=_always_on_cpu,
    ),
)
