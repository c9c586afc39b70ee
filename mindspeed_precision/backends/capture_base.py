"""What the observers need from a framework, beyond what the record stage needs (``base.Backend``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from mindspeed_precision.backends.base import Backend


class Handle(Protocol):
    """What a hook returns."""

    def remove(self) -> None:
        """Take the hook away; a second call does nothing."""
        ...


BeforeCall = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
"""Called with ``(module, args, kwargs)`` before a module's forward."""

AfterCall = Callable[[Any, tuple[Any, ...], dict[str, Any], object], None]
"""Called with ``(module, args, kwargs, output)`` after it."""

Product = Callable[[], Any]
ObserveProduct = Callable[[Any, Any, Product], Any]
"""Called with ``(left, right, compute)`` for a matrix product; returns what ``compute`` returns."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """What an optimizer does to one tensor in one step.

    Attributes:
        updated: the tensor that is updated: the model's parameter, or a copy of it.
        gradient: the gradient that is applied, after clipping.
        hyperparameters: numbers that are applied, by their names in ``torch.optim``; host numbers or tensors.
        states: ``exp_avg`` and ``exp_avg_sq``, or ``momentum_buffer``, where the optimizer has them by now.
    """

    updated: Any
    gradient: Any
    hyperparameters: Mapping[str, Any]
    states: Mapping[str, Any]


class CaptureBackend(Backend, Protocol):
    """A framework, as seen by the observers: modules, autograd, optimizers, processes.

    Everything here observes: no method changes a bit of the run, nor a random generator, nor the graph's
    order of sums. Callbacks get the framework's own tensors and modules.

    Attributes:
        framework: ``torch`` or ``mindspore``: what computes.
        api: what the program believes to use where that is another framework (``torch`` on MindSpore).
        patch_groups: groups of patches that this backend needs in order to see.
    """

    framework: str
    api: str
    patch_groups: tuple[str, ...]

    # tensors

    def detach(self, tensor: Any) -> Any:
        """Return a view of ``tensor`` that autograd does not know."""
        ...

    def address(self, tensor: Any) -> int:
        """Return where the first element lies in memory."""
        ...

    def version(self, tensor: Any) -> int:
        """Return a number that grows with every write in place; 0 where the framework does not count."""
        ...

    def integers(self, values: Sequence[int]) -> Any:
        """Return ``values`` as an int64 tensor ``[n]`` on the host."""
        ...

    def number(self, value: object) -> float | None:
        """Return a host number, or a one-element tensor that lies on the host; None: on a device."""
        ...

    def wide_scalar(self, tensor: Any) -> Any:
        """Return a one-element tensor as a float64 scalar ``[]`` on its own device, as wide as a number."""
        ...

    def norm(self, tensors: Sequence[Any]) -> Any:
        """Return the 2-norm over all elements as a scalar ``[]``: float32, or float64 for float64."""
        ...

    def difference(self, after: Any, before: Any) -> Any:
        """Return ``after - before``; both of one shape and dtype."""
        ...

    def copy(self, tensor: Any) -> Any:
        """Return a copy that later writes to ``tensor`` do not change."""
        ...

    # laws that are checked while training

    def product_excess(self, product: Any, left: Any, right: Any, sides: Sequence[Any] = ()) -> Any:
        """Return how far ``product`` is from ``left.T @ right`` by random signs (``record.freivalds``).

        Args:
            product: ``[out, in]``.
            left: ``[tokens, out]``.
            right: ``[tokens, in]``.
            sides: ``[out, in]`` each, sums whose difference ``product`` is: they were rounded.

        Returns:
            A one-element tensor: the largest residual over its bound; above 1 it is no such product. NaN
            where something is not finite.
        """
        ...

    def not_the_sum(self, total: Any, before: Any, added: Any) -> Any:
        """Return how many elements of ``total`` are not ``before + added``, rounded to its dtype.

        A one-element integer tensor; a NaN equals a NaN.
        """
        ...

    # autograd

    def grad_enabled(self) -> bool:
        """Tell whether a forward that runs now is recorded for a backward."""
        ...

    def inside_backward(self) -> bool:
        """Tell whether this thread runs a backward pass (a forward seen now is a recomputation)."""
        ...

    def requires_grad(self, tensor: Any) -> bool:
        """Tell whether a gradient of ``tensor`` will be computed."""
        ...

    def is_leaf(self, tensor: Any) -> bool:
        """Tell whether no operation made ``tensor``: hooks on it outlive the graph."""
        ...

    def is_parameter(self, value: object) -> bool:
        """Tell whether ``value`` is a parameter of a model."""
        ...

    def gradient(self, parameter: Any) -> Any:
        """Return what its gradients are accumulated in: ``main_grad``, else ``.grad``; or None."""
        ...

    def hook_gradient(self, tensor: Any, observe: Callable[[Any], None]) -> Handle:
        """Call ``observe`` with the gradient of ``tensor``, summed over everything that consumes it."""
        ...

    def hook_before_write(self, tensor: Any, observe: Callable[[Any], None]) -> None:
        """Call ``observe`` with the gradient of what ``tensor`` was before it was last written in place.

        Does nothing where `hook_gradient`, called before the write, sees it anyway.
        """
        ...

    def hook_accumulation(
        self, parameter: Any, before: Callable[[Any], None], after: Callable[[], None] | None
    ) -> list[Any]:
        """Call ``before`` with dW ahead of its accumulation, and ``after`` once it is added.

        What is returned must be kept alive.
        """
        ...

    def watch_products(self, observe: ObserveProduct) -> AbstractContextManager[Any]:
        """Show every matrix product of two tensors that this thread calls inside the block to ``observe``."""
        ...

    # modules

    def is_module(self, value: object) -> bool:
        """Tell whether ``value`` is a module."""
        ...

    def children(self, module: Any) -> Iterable[tuple[str, Any]]:
        """Yield ``(local name, module)`` of the direct children."""
        ...

    def own_parameters(self, module: Any) -> Iterable[tuple[str, Any]]:
        """Yield ``(local name, parameter)`` of the module itself, not of its children."""
        ...

    def own_buffers(self, module: Any) -> Iterable[tuple[str, Any, bool]]:
        """Yield ``(local name, buffer, whether a checkpoint holds it)`` of the module itself."""
        ...

    def is_training(self, module: Any) -> bool:
        """Tell whether the module is in train mode."""
        ...

    def hook_call(self, module: Any, before: BeforeCall, after: AfterCall) -> list[Handle]:
        """Call ``before`` ahead of all other hooks and of the forward, ``after`` behind it."""
        ...

    # optimizers

    def is_optimizer(self, value: object) -> bool:
        """Tell whether ``value`` is an optimizer of the framework itself."""
        ...

    def hook_step(
        self, optimizer: Any, before: Callable[[], None], after: Callable[[], None]
    ) -> list[Handle]:
        """Call ``before`` and ``after`` around every step of an optimizer of the framework."""
        ...

    def parameter_groups(self, optimizer: Any) -> Iterable[tuple[Mapping[str, Any], Sequence[Any]]]:
        """Return every parameter group as its settings and what is updated by them."""
        ...

    def updates(self, optimizer: Any) -> Iterator[Update]:
        """Yield what the step that is about to be made, or was just made, updates."""
        ...

    # processes

    def rank(self) -> tuple[int, int]:
        """Return ``(rank, world size)``; ``(0, 1)`` for a process alone."""
        ...

    def group_ranks(self, group: Any) -> Sequence[int]:
        """Return the ranks of a process group, as numbers of the world; None: of the default group."""
        ...

    def from_first_rank(self, value: Any) -> Any:
        """Return rank 0's ``value`` on every rank: a small object that can be pickled."""
        ...

    def wait_for_all(self) -> None:
        """Return when every rank has called it."""
        ...

    # the run

    def version_text(self) -> str:
        """Return the framework's version."""
        ...

    def numerics(self, parameter: Any) -> dict[str, Any]:
        """Return what a replay needs in order to compute as the run did on ``parameter``'s device."""
        ...

    def random_states(self) -> Mapping[str, Any]:
        """Return the state of every generator of the framework, by its name; a tensor or bytes."""
        ...
