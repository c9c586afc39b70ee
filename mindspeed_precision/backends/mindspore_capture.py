"""What observers need of MindSpore tensors and their tape, under torch's API and under MindSpore's own.

Measured on MindSpore 2.7.1 and 2.10.0 (CPU): a hook on a parameter sees dW of one backward, summed over the
uses of a tied weight, before it is accumulated; a hook on its own node of the tape runs after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.backends.capture_base import Handle, ObserveProduct
from mindspeed_precision.backends.mindspore import MindSporeBackend
from mindspeed_precision.record.elements import UNIT_ROUNDOFF, to_bits, to_numbers
from mindspeed_precision.record.freivalds import excess

_local = threading.local()
"""What is going on in this thread: the observer of matrix products, the depth of backward passes."""


class MindSporeTape(MindSporeBackend):
    """The half of ``CaptureBackend`` that is about tensors and autograd; its children know modules."""

    framework = "mindspore"

    def detach(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself: it is read outside the tape."""
        return tensor

    def address(self, tensor: Tensor) -> int:
        """Return where the first element lies."""
        return int(tensor.data_ptr())

    def version(self, tensor: Tensor) -> int:
        """Return 0: MindSpore does not count writes."""
        return 0

    def integers(self, values: Sequence[int]) -> Tensor:
        """Return ``values`` as an int64 tensor."""
        return Tensor(np.asarray(values, dtype=np.int64))

    def number(self, value: object) -> float | None:
        """Return a number, or the value of a one-element tensor: in debug mode no operator is pending."""
        if isinstance(value, Tensor):
            return float(value.asnumpy().reshape(()))
        return float(value)  # type: ignore[arg-type]

    def wide_scalar(self, tensor: Tensor) -> Tensor:
        """Return a one-element tensor as float64 ``[]``."""
        return Tensor(np.asarray(tensor.asnumpy(), dtype=np.float64).reshape(()).copy())

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the 2-norm over all elements, added in float64 on the host and rounded to float32."""
        wide = any(self.dtype(tensor) == "float64" for tensor in tensors)
        total = sum(float(np.square(tensor.asnumpy().astype(np.float64)).sum()) for tensor in tensors)
        return Tensor(np.asarray(np.sqrt(total), dtype=np.float64 if wide else np.float32))

    def difference(self, after: Tensor, before: Tensor) -> Tensor:
        """Return ``after - before``."""
        return after - before

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy, in C order and unknown to the tape."""
        return Tensor(tensor.asnumpy().copy(), tensor.dtype)

    def product_excess(
        self, product: Tensor, left: Tensor, right: Tensor, sides: Sequence[Tensor] = ()
    ) -> Tensor:
        """Compare on the host: in debug mode no operator is pending."""
        matrix, one, two = (self._numbers(tensor) for tensor in (product, left, right))
        rows = [np.linalg.norm(self._numbers(side), axis=1) for side in sides]
        if not all(np.isfinite(values).all() for values in (matrix, one, two)):
            return Tensor(np.array([np.nan]))
        result = UNIT_ROUNDOFF.get(self.dtype(product), UNIT_ROUNDOFF["float32"])
        found = excess(
            matrix,
            one,
            two,
            accumulator=min(result, UNIT_ROUNDOFF["float32"]),
            result=result,
            further=2 * result * np.sum(rows, axis=0) if rows else None,
        )
        return Tensor(np.array([found.ratio]))

    def not_the_sum(self, total: Tensor, before: Tensor, added: Tensor) -> Tensor:
        """Add again on the host."""
        sums = self._numbers(before) + self._numbers(added)
        dtype = self.dtype(total)
        narrow = sums.astype(np.float64 if dtype == "float64" else np.float32)
        expected = to_numbers(HostTensor(bits=to_bits(narrow, dtype), dtype=dtype)).astype(np.float64)
        found = self._numbers(total)
        same = (expected == found) | (np.isnan(expected) & np.isnan(found))
        return Tensor(np.array([int((~same).sum())], dtype=np.int64))

    def _numbers(self, tensor: Tensor) -> NDArray[np.float64]:
        return to_numbers(self.to_host(self.snapshot(tensor))).astype(np.float64)

    def inside_backward(self) -> bool:
        """Tell whether a backward pass runs, as far as `observe_backward_pass` sees it begin."""
        return getattr(_local, "backwards", 0) > 0

    def requires_grad(self, tensor: Tensor) -> bool:
        """Tell whether the tape knows the tensor."""
        return bool(tensor._requires_grad)

    def is_leaf(self, tensor: Tensor) -> bool:
        """Tell whether no operation made it."""
        return bool(tensor._is_leaf)

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return ``main_grad`` where Megatron's DDP keeps one, else what the tape accumulates."""
        gradient: Tensor | None = getattr(parameter, "main_grad", None)
        return parameter._grad if gradient is None else gradient

    def hook_gradient(self, tensor: Tensor, observe: Callable[[Tensor], None]) -> Handle:
        """Hook the tensor; an observer returns nothing, so the gradient goes on as it came."""
        handle: Handle = tensor.register_hook(observe)
        return handle

    def hook_before_write(self, tensor: Tensor, observe: Callable[[Tensor], None]) -> None:
        """Do nothing: without a count of writes nobody asks."""

    def hook_accumulation(
        self, parameter: Tensor, before: Callable[[Tensor], None], after: Callable[[], None] | None
    ) -> list[Any]:
        """Hook the parameter, and the node of the tape behind it.

        Under ``value_and_grad`` nothing is accumulated, and only ``before`` is called.
        """
        kept: list[Any] = [parameter.register_hook(before)]
        node = parameter._grad_node
        if after is not None and node is not None:
            kept.append(node.register_hook(lambda *_: after()))
        return kept

    @contextmanager
    def watch_products(self, observe: ObserveProduct) -> Iterator[None]:
        """Show what the patches of the group ``mindspore`` see (`observe_product`)."""
        outer = getattr(_local, "observe", None)
        _local.observe = observe
        try:
            yield
        finally:
            _local.observe = outer

    def version_text(self) -> str:
        """Return MindSpore's version."""
        return str(mindspore.__version__)

    def numerics(self, parameter: Tensor) -> dict[str, Any]:
        """Return what decides how this process computes."""
        return {
            "device": device(),
            "deterministic_algorithms": mindspore.get_context("deterministic") == "ON",
            "mode": "pynative" if mindspore.get_context("mode") == mindspore.PYNATIVE_MODE else "graph",
        }

    def random_states(self) -> Mapping[str, Any]:
        """Return the state of MindSpore's default generator."""
        return {"mindspore": mindspore.get_rng_state()}


def device() -> str:
    """Return ``npu``, ``cuda`` or ``cpu``: where MindSpore computes."""
    return {"Ascend": "npu", "GPU": "cuda"}.get(str(mindspore.get_context("device_target")), "cpu")


def observe_product(
    wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Show a matrix product to whoever watches. Wraps ``matmul`` and ``mm``, functions and methods.

    MindSpore has no function mode as torch has: its methods cannot be seen from outside but by a patch.
    """
    observe = getattr(_local, "observe", None)
    operands = args if instance is None else (instance, *args)
    if observe is None or len(operands) != 2 or not all(isinstance(item, Tensor) for item in operands):
        return wrapped(*args, **kwargs)
    _local.observe = None  # one product may be made of another
    try:
        return observe(operands[0], operands[1], lambda: wrapped(*args, **kwargs))
    finally:
        _local.observe = observe


def observe_backward_pass(
    wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Note that a backward pass runs: what modules are called meanwhile recompute.

    Wraps what starts the tape; MindSpore does not tell whether it is running.
    """
    _local.backwards = getattr(_local, "backwards", 0) + 1
    try:
        return wrapped(*args, **kwargs)
    finally:
        _local.backwards -= 1
