"""The two ways in which a PyNative loop differentiates; both add up the gradients of several microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, _c_expression

from mindspeed_precision.errors import ConfigError

try:  # its home since 2.9, where the old one warns
    from mindspore.graph.api import _pynative_executor
except ImportError:
    from mindspore.common.api import _pynative_executor

LossFunction = Callable[[], Tensor]
"""Runs one microbatch forward and returns the scalar that is differentiated."""


class Gradients(Protocol):
    """Gradients of a loss, added up over microbatches."""

    def add(self) -> None:
        """Run one microbatch forward and backward."""

    def take(self) -> tuple[Tensor, ...]:
        """Return the sums, in the order of the parameters."""

    def clear(self) -> None:
        """Start anew."""


class ValueAndGrad:
    """``mindspore.value_and_grad``, and a sum made by the loop.

    Args:
        loss: runs one microbatch forward.
        parameters: what it is differentiated by.
    """

    def __init__(self, loss: LossFunction, parameters: Sequence[Parameter]) -> None:
        self._function = mindspore.value_and_grad(loss, None, list(parameters))
        self._sums: tuple[Tensor, ...] = ()

    def add(self) -> None:
        """Run one microbatch forward and backward."""
        _, gradients = self._function()
        if self._sums:
            gradients = tuple(old + new for old, new in zip(self._sums, gradients, strict=True))
        self._sums = gradients

    def take(self) -> tuple[Tensor, ...]:
        """Return the sums, in the order of the parameters."""
        return self._sums

    def clear(self) -> None:
        """Start anew."""
        self._sums = ()


class Tape:
    """MindSpore's own tape (from 2.7.1): it adds into ``Parameter._grad`` as torch does into ``.grad``.

    Args:
        loss: runs one microbatch forward.
        parameters: what it is differentiated by.

    Raises:
        ConfigError: this MindSpore has no tape.
    """

    def __init__(self, loss: LossFunction, parameters: Sequence[Parameter]) -> None:
        self._loss = loss
        self._parameters = parameters
        _require_tape()

    def add(self) -> None:
        """Run one microbatch forward and backward."""
        with taping():
            loss = self._loss()
            # looked up at each call: whoever debugs the run may wrap it
            _c_expression.run_backward(
                (loss,),
                (Tensor(np.float32(1)),),
                False,  # keep_graph
                False,  # create_graph
                (),  # inputs: all leaves
                allow_unreachable=True,
                accumulate_grad=True,
            )

    def take(self) -> tuple[Tensor, ...]:
        """Return the sums, in the order of the parameters."""
        return tuple(parameter._grad for parameter in self._parameters)

    def clear(self) -> None:
        """Start anew."""
        for parameter in self._parameters:
            parameter._grad = None


@contextmanager
def taping() -> Any:
    """Record operations on the tape; any ``value_and_grad`` in between would end it."""
    _pynative_executor.set_grad_flag(True)
    try:
        yield
    finally:
        _pynative_executor.set_grad_flag(False)


def _require_tape() -> None:
    if not hasattr(_c_expression, "run_backward"):
        raise ConfigError(
            "this MindSpore has no tape",
            where="gradients",
            found=f"MindSpore {mindspore.__version__}",
            expected="2.7.1 or later",
            remedy="use value_and_grad",
        )


WAYS: dict[str, Callable[[LossFunction, Sequence[Parameter]], Gradients]] = {
    "tape": Tape,
    "value_and_grad": ValueAndGrad,
}
