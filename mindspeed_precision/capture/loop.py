"""Megatron's own loop, seen from outside: when the model exists, when a step begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from mindspeed_precision.capture.batch import observe_step_losses, observed_forward_step
from mindspeed_precision.capture.context import CaptureContext
from mindspeed_precision.errors import PatchError

LOSSES = 0
"""Position of the loss dictionary in what ``train_step`` returns: Megatron 0.12 to 0.19, MindSpeed-MM."""


class LoopDriver(Protocol):
    """What the loop's patches drive: a session."""

    @property
    def context(self) -> CaptureContext | None:
        """The observers of this rank, or None when it does not record."""
        ...

    def before_setup(self) -> None:
        """Model and optimizer are about to be built."""
        ...

    def attach(self, model: Any, optimizer: Any) -> None:
        """Model and optimizer exist."""
        ...

    def begin_training(self) -> None:
        """The loop is about to make its first step."""
        ...

    def begin_step(self, step: int | None) -> None:
        """Step ``step`` (0-based; None: the next one) begins."""
        ...

    def end_step(self) -> None:
        """The step is over."""
        ...


_drivers: list[LoopDriver] = []


@contextmanager
def driving(driver: LoopDriver) -> Iterator[None]:
    """Make ``driver`` the one that the loop's patches drive."""
    _drivers.append(driver)
    try:
        yield
    finally:
        _drivers.remove(driver)


def observe_setup(
    wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Attach to what ``setup_model_and_optimizer`` returns: ``(model chunks, optimizer, scheduler)``."""
    if _drivers:
        _drivers[-1].before_setup()
    built = wrapped(*args, **kwargs)
    if _drivers:
        _drivers[-1].attach(built[0], built[1])
    return built


def loaded_step() -> int:
    """Return the step that a checkpoint left off at, as the loop has noted it when the model exists."""
    from megatron.training import get_args  # the loop that calls us has imported it

    step = getattr(get_args(), "iteration", 0)
    return step if isinstance(step, int) else 0


def observe_train(
    wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Tell the session that ``train`` begins: every other patch must be in place by now."""
    if _drivers:
        _drivers[-1].begin_training()
    return wrapped(*args, **kwargs)


def observe_train_step(
    wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Begin a step, let its batches and losses be seen, end it.

    Wraps ``train_step(forward_step_func, data_iterator, …)``. Its result is a tuple of 7 (Megatron 0.12 to
    0.15), 8 or 4 (MindSpeed-MM) entries that begins with the dictionary of losses.
    """
    if not _drivers:
        return wrapped(*args, **kwargs)
    driver = _drivers[-1]
    driver.begin_step(_iteration(kwargs))
    context = driver.context
    if context is not None and context.settings.batch:
        args, kwargs = _with_observed_forward_step(context, args, kwargs)
    result = wrapped(*args, **kwargs)
    if context is not None and context.settings.batch:
        if not (isinstance(result, tuple) and len(result) > LOSSES and isinstance(result[LOSSES], dict)):
            raise PatchError(
                "train_step returned something else than this version knows",
                where="megatron.training.training:train_step",
                found=f"{type(result).__name__}",
                expected="a tuple that begins with the dictionary of losses",
                remedy="report the version of Megatron; capture.batch=false does without losses",
            )
        observe_step_losses(context, result[LOSSES])
    driver.end_step()
    return result


def _with_observed_forward_step(
    context: CaptureContext, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (observed_forward_step(context, args[0]), *args[1:]), kwargs
    name = "forward_step_func"
    return args, {**kwargs, name: observed_forward_step(context, kwargs[name])}


def _iteration(kwargs: dict[str, Any]) -> int | None:
    """Return Megatron's 0-based iteration: an argument since 0.16, else noted on its global arguments."""
    if isinstance(kwargs.get("iteration"), int):
        return int(kwargs["iteration"])
    from megatron.training import get_args  # the loop that calls us has imported it

    current = getattr(get_args(), "curr_iteration", None)
    return current if isinstance(current, int) else None
