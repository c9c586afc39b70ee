"""Autograd: MindSpore's own tape behind ``Tensor.backward``, ``.grad`` and ``torch.autograd``.

MindSpore 2.7.1 keeps a tape in C++ (``run_backward``, ``Tensor._grad``, ``_requires_grad``,
``_grad_node``), with torch's contract. mindtorch 0.5.1 was written before it: it hides those attributes
behind its own, and its ``backward`` does nothing.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from mindspeed_precision.testing.mindtorch.piece import CompatPiece, Mends, load


def _tensor_class() -> Any:
    return load("mindspore").Tensor


def _uncover_state() -> None:
    tensor, parameter = _tensor_class(), load("mindtorch.nn.parameter").Parameter
    load("mindspore.common.api")._pynative_executor.set_grad_flag(True)
    if isinstance(tensor.__dict__.get("_requires_grad"), bool):
        del tensor._requires_grad
    for name in ("grad", "_grad_fn"):
        if name in parameter.__dict__:
            delattr(parameter, name)

    def set_requires_grad(self: Any, value: bool) -> None:
        self._requires_grad = bool(value)

    def requires_grad_(self: Any, requires_grad: bool = True) -> Any:
        self._requires_grad = bool(requires_grad)
        return self

    def set_grad(self: Any, value: Any) -> None:
        self._grad = value

    tensor.grad = property(lambda self: self._grad, set_grad)
    tensor.requires_grad = property(lambda self: self._requires_grad, set_requires_grad)
    tensor.requires_grad_ = requires_grad_
    tensor.is_leaf = property(lambda self: self._is_leaf)
    tensor.grad_fn = property(_grad_fn)


def _grad_fn(self: Any) -> Any:
    node = self._grad_node
    return None if node is None or node.is_leaf() else node


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if value is None or isinstance(value, _tensor_class()) else tuple(value)


def _engine() -> Callable[..., Any]:
    engine: Callable[..., Any] = load("mindspore._c_expression").run_backward
    return engine


def _seeds(tensors: tuple[Any, ...], grad_tensors: Any) -> tuple[Any, ...]:
    torch = load("mindtorch")
    given = (None,) * len(tensors) if grad_tensors is None else _as_tuple(grad_tensors)
    return tuple(
        torch.ones(tuple(tensor.shape), dtype=tensor.dtype) if seed is None else seed
        for tensor, seed in zip(tensors, given, strict=True)
    )


def run_backward(
    tensors: Any,
    grad_tensors: Any = None,
    keep_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
    allow_unreachable: bool = True,
    accumulate_grad: bool = True,
) -> Any:
    """Run the tape backward, with the signature of torch's engine."""
    outputs = _as_tuple(tensors)
    return _engine()(
        outputs,
        _seeds(outputs, grad_tensors),
        bool(keep_graph),
        create_graph,
        () if inputs is None else _as_tuple(inputs),
        allow_unreachable=allow_unreachable,
        accumulate_grad=accumulate_grad,
    )


def backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Stand in for ``torch.autograd.backward``: accumulate into ``.grad`` of the leaves."""
    run_backward(tensors, grad_tensors, retain_graph, create_graph, inputs)


def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    **_: Any,
) -> Any:
    """Stand in for ``torch.autograd.grad``: return the gradients, change no ``.grad``."""
    return run_backward(
        outputs,
        grad_outputs,
        retain_graph,
        create_graph,
        inputs,
        allow_unreachable=True,
        accumulate_grad=False,
    )


def _run_the_native_tape() -> None:
    tensor, autograd = _tensor_class(), load("mindtorch.autograd")

    def tensor_backward(
        self: Any,
        gradient: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        backward(self, gradient, retain_graph, create_graph, inputs)

    tensor.backward = tensor_backward
    tensor._execution_engine = types.SimpleNamespace(run_backward=run_backward)
    autograd.backward, autograd.grad, autograd.Variable = backward, grad, tensor
    load("mindtorch.autograd.variable").Variable = tensor


def _restore_native_hooks() -> None:
    tensor = _tensor_class()
    tensor.register_hook = tensor.__dict__.get(_KEPT_HOOK, tensor.register_hook)


_KEPT_HOOK = "_mindspeed_precision_native_register_hook"


def keep_native_methods() -> None:
    """Keep MindSpore's own ``register_hook`` and ``contiguous``, before mindtorch replaces them."""
    tensor = _tensor_class()
    setattr(tensor, _KEPT_HOOK, tensor.register_hook)
    tensor._mindspeed_precision_native_contiguous = tensor.contiguous


PIECES = (
    CompatPiece(
        name="tape_state",
        mends=Mends.MINDTORCH,
        changes=(
            *("Tensor._requires_grad", "Tensor.requires_grad", "Tensor.requires_grad_", "Tensor.grad"),
            *("Tensor.is_leaf", "Tensor.grad_fn", "Parameter.grad", "Parameter._grad_fn"),
        ),
        why="mindtorch sets class attributes over the state that MindSpore's tape keeps in the tensor: "
        "requires_grad and .grad never reach the tape, and .grad of a parameter is None for ever.",
        error_without="silent: every .grad stays None, and only weight decay moves the parameters",
        when="every run",
        apply=_uncover_state,
    ),
    CompatPiece(
        name="tape_backward",
        mends=Mends.MINDTORCH,
        changes=(
            *(
                "Tensor.backward",
                "Tensor._execution_engine",
                "torch.autograd.backward",
                "torch.autograd.grad",
            ),
            "torch.autograd.Variable",
        ),
        why="mindtorch's Tensor.backward returns without doing anything. These run MindSpore's tape.",
        error_without="ModuleNotFoundError: No module named 'mindtorch.autograd.Variable'; without that "
        "silent: backward does nothing",
        when="every run",
        apply=_run_the_native_tape,
    ),
    CompatPiece(
        name="tensor_hooks",
        mends=Mends.MINDTORCH,
        changes=("Tensor.register_hook",),
        why="MindSpore's own register_hook sees the gradients of its tape; mindtorch's does not.",
        error_without="silent: a hook that is never called",
        when="runs that are recorded",
        apply=_restore_native_hooks,
        optional=True,
    ),
)
