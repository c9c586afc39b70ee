"""The two ways in which a PyNative loop differentiates; both add up the gradients of several microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import mindspore
import numpy as np
from mindspore import Parameter, Tensor

from mindspeed_precision.errors import ConfigError

LossFunction = Callable[..., Tensor]


class Gradients(Protocol):
    """Gradients of a loss, added up over microbatches."""

    def add(self, *batch: Tensor) -> Tensor:
        """Run one microbatch forward and backward; return its loss."""

    def take(self) -> tuple[Tensor, ...]:
        """Return the sums, in the order of the parameters, and start anew."""


class ValueAndGrad:
    """``mindspore.value_and_grad``, and a sum made by the loop.

    Args:
        loss: returns the scalar that is differentiated.
        parameters: what it is differentiated by.
    """

    def __init__(self, loss: LossFunction, parameters: Sequence[Parameter]) -> None:
        self._function = mindspore.value_and_grad(loss, None, list(parameters))
        self._sums: tuple[Tensor, ...] = ()

    def add(self, *batch: Tensor) -> Tensor:
        """Run one microbatch forward and backward; return its loss."""
        loss, gradients = self._function(*batch)
        if self._sums:
            gradients = tuple(old + new for old, new in zip(self._sums, gradients, strict=True))
        self._sums = gradients
        return loss

    def take(self) -> tuple[Tensor, ...]:
        """Return the sums, in the order of the parameters, and start anew."""
        sums, self._sums = self._sums, ()
        return sums


class Tape:
    """MindSpore's own tape (from 2.7.1): it adds into ``Parameter._grad`` as torch does into ``.grad``.

    Args:
        loss: returns the scalar that is differentiated.
        parameters: what it is differentiated by.

    Raises:
        ConfigError: this MindSpore has no tape.
    """

    def __init__(self, loss: LossFunction, parameters: Sequence[Parameter]) -> None:
        self._loss = loss
        self._parameters = parameters
        self._run_backward = _tape_entry()

    def add(self, *batch: Tensor) -> Tensor:
        """Run one microbatch forward and backward; return its loss."""
        with taping():
            loss = self._loss(*batch)
            self._run_backward(
                (loss,),
                (Tensor(np.float32(1)),),
                False,  # keep_graph
                False,  # create_graph
                (),  # inputs: all leaves
                allow_unreachable=True,
                accumulate_grad=True,
            )
        return loss

    def take(self) -> tuple[Tensor, ...]:
        """Return the sums, in the order of the parameters, and start anew."""
        sums = tuple(parameter._grad for parameter in self._parameters)
        for parameter in self._parameters:
            parameter._grad = None
        return sums


@contextmanager
def taping() -> Any:
    """Record operations on the tape; any ``value_and_grad`` in between would end it."""
    from mindspore.common.api import _pynative_executor

    _pynative_executor.set_grad_flag(True)
    try:
        yield
    finally:
        _pynative_executor.set_grad_flag(False)


def _tape_entry() -> Any:
    try:
        from mindspore._c_expression import run_backward
    except ImportError as error:
        raise ConfigError(
            "this MindSpore has no tape",
            where="gradients",
            found=f"MindSpore {mindspore.__version__}",
            expected="2.7.1 or later",
            remedy="use value_and_grad",
        ) from error
    return run_backward


WAYS: dict[str, Callable[[LossFunction, Sequence[Parameter]], Gradients]] = {
    "tape": Tape,
    "value_and_grad": ValueAndGrad,
}
