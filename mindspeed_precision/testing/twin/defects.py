"""What the installed MindSpore computes wrongly on a CPU: each probe runs the smallest real case.

A demo or a test asks a probe before it asserts, so that a release without the defect is told as such.
Measured: ``accumulation``, ``in_place`` and ``mint_optimizer`` in 2.7.1 and 2.10.0, ``split`` in 2.10.0.

The two layout defects follow one law, checked bit for bit over transposed, strided and offset operands: the
kernel reads an operand as if it were dense and began at the first element of its storage, so that it ignores
its strides and its storage offset (``read_ignoring_layout``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, mint
from mindspore.common._grad_function import _Function
from numpy.typing import NDArray

from mindspeed_precision.testing.twin.gradients import Tape
from mindspeed_precision.testing.twin.trainer import prepare_mindspore

Array = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a probe found.

    Attributes:
        name: of the defect.
        mindspore: the release that was asked.
        expected: what the operation should give, computed with numpy.
        found: what MindSpore gave.
        law: what the defect gives where it is known exactly; None otherwise.
    """

    name: str
    mindspore: str
    expected: Array
    found: Array
    law: Array | None = None

    @property
    def present(self) -> bool:
        """Whether this MindSpore has the defect."""
        return not np.array_equal(self.found, self.expected)

    @property
    def follows_law(self) -> bool:
        """Whether what was found is, bit for bit, what the known defect gives."""
        return self.law is not None and self.found.tobytes() == self.law.tobytes()


def read_ignoring_layout(storage: Array, shape: tuple[int, ...]) -> Array:
    """Return what a kernel sees that takes the storage's first elements for a dense tensor of ``shape``.

    Args:
        storage: every element of the storage, from its first.
        shape: of the tensor.
    """
    count = int(np.prod(shape))
    return np.ascontiguousarray(storage).reshape(-1)[:count].reshape(shape)


def split_ignores_strides() -> Measurement:
    """Differentiate ``mint.split`` where the incoming gradients are transposed views.

    ``Σ (split(x)[i]ᵀ · W_i)``: the gradient of x is the ``W_iᵀ`` side by side.
    """
    prepare_mindspore()
    factors = [np.arange(1, 7, dtype=np.float32).reshape(2, 3) * 10.0**part for part in range(2)]
    factors = [factor.astype(np.float32) for factor in factors]

    def function(tensor: Tensor) -> Tensor:
        parts = mint.split(tensor * 1.0, 2, dim=1)
        return sum(mint.sum(part.t() * Tensor(factor)) for part, factor in zip(parts, factors, strict=True))

    gradient = mindspore.grad(function)(Tensor(np.ones((3, 4), dtype=np.float32)))
    return Measurement(
        name="mint.split ignores the layout of incoming gradients",
        mindspore=mindspore.__version__,
        expected=np.concatenate([factor.T for factor in factors], axis=1),
        found=_host(gradient),
        law=np.concatenate([read_ignoring_layout(factor, (3, 2)) for factor in factors], axis=1),
    )


class _GivenGradient(_Function):
    """A function of a weight whose backward pass returns the gradient that it was given."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return mint.sum(weight)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


def accumulation_ignores_strides() -> Measurement:
    """Accumulate two weight gradients on the tape, each a transposed view."""
    prepare_mindspore()
    stored = [np.arange(1, 7, dtype=np.float32).reshape(3, 2), np.full((3, 2), 0.25, dtype=np.float32)]
    weight = Parameter(Tensor(np.zeros((2, 3), dtype=np.float32)), name="weight")
    arriving = iter([Tensor(array).t() for array in stored])
    tape = Tape(lambda: _GivenGradient.apply(weight, next(arriving)), [weight])
    for _ in stored:
        tape.add()
    (total,) = tape.take()
    return Measurement(
        name="accumulation ignores the layout of its operands",
        mindspore=mindspore.__version__,
        expected=stored[0].T + stored[1].T,
        found=_host(total),
        law=read_ignoring_layout(stored[0], (2, 3)) + read_ignoring_layout(stored[1], (2, 3)),
    )


def in_place_lost() -> Measurement:
    """Add to a tensor in place, and look at the tensor."""
    prepare_mindspore()
    before = np.arange(1, 4, dtype=np.float32)
    tensor = Tensor(before.copy())
    tensor.add_(Tensor(np.float32(1)))
    return Measurement(
        name="in-place addition leaves its target as it was",
        mindspore=mindspore.__version__,
        expected=before + 1,
        found=_host(tensor),
        law=before,
    )


def mint_optimizer_does_nothing() -> Measurement:
    """Take one step of ``mint.optim.SGD`` with gradients of one."""
    from mindspore.mint import optim

    prepare_mindspore()
    before = np.arange(1, 4, dtype=np.float32)
    weight = Parameter(Tensor(before.copy()), name="weight")
    optim.SGD([weight], lr=0.5)((Tensor(np.ones(3, dtype=np.float32)),))
    return Measurement(
        name="mint.optim leaves parameters as they were",
        mindspore=mindspore.__version__,
        expected=before - np.float32(0.5),
        found=_host(weight),
        law=before,
    )


def _host(tensor: Tensor) -> Array:
    return tensor.asnumpy().copy()  # asnumpy() shares memory with the tensor on a CPU


PROBES: dict[str, Callable[[], Measurement]] = {
    "split": split_ignores_strides,
    "accumulation": accumulation_ignores_strides,
    "in_place": in_place_lost,
    "mint_optimizer": mint_optimizer_does_nothing,
}
