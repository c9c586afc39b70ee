"""A failure of ours ends the capture and nothing else: training goes on as it would without us.

Whatever of this package runs inside a training is called through here. An error of the training's own passes
through as it came; one of ours is noted once, and from then on every observer does nothing.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_precision.redaction import redact_text

Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""wrapt's form: ``(wrapped, instance, args, kwargs)``."""

_PACKAGE = Path(__file__).parent.parent
_FRAMES = 6
_LONGEST = 300


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What ended the capture.

    Attributes:
        where: what was being done, in words.
        error: class and message, in one line.
        frames: ``file:line in function`` of the innermost calls, outermost first.
    """

    where: str
    error: str
    frames: tuple[str, ...]

    @classmethod
    def of(cls, where: str, error: Exception) -> Failure:
        """Describe ``error``; its text may be long or have lines."""
        text = redact_text(" ".join(str(error).split()))
        name = type(error).__name__
        frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
        return cls(
            where=where,
            error=f"{name}: {text[:_LONGEST]}" if text else name,
            frames=tuple(f"{_short(frame.filename)}:{frame.lineno} in {frame.name}" for frame in frames),
        )


def _short(filename: str) -> str:
    path = Path(filename)
    inside = path.is_relative_to(_PACKAGE)
    return str(path.relative_to(_PACKAGE.parent)) if inside else path.name


class Containment:
    """Keeps errors of ours out of the training.

    Args:
        ended: called once, with the first failure, where it happened: inside a forward, a backward, a step.
            It must do little.

    Attributes:
        failure: the first failure; None while capture goes on.
    """

    def __init__(self, ended: Callable[[Failure], None] | None = None) -> None:
        self.failure: Failure | None = None
        self._ended = ended
        self._meant: BaseException | None = None
        self._lock = threading.Lock()

    def refusal(self, error: BaseException) -> BaseException:
        """Return ``error``, which is meant for the user and passes: a setting that cannot be kept to."""
        self._meant = error
        return error

    def failed(self, where: str, error: Exception) -> None:
        """Note a failure of ours; only the first one counts."""
        with self._lock:  # a backward may run on threads of its own
            if self.failure is not None:
                return
            self.failure = Failure.of(where, error)
        if self._ended is not None:
            self._ended(self.failure)

    def run(self, where: str, function: Callable[..., Any], *args: Any) -> Any:
        """Return what ``function`` returns; None where it fails, or capture has ended."""
        if self.failure is None:
            try:
                return function(*args)
            except Exception as error:  # noqa: BLE001  the training goes on
                self.failed(where, error)
        return None

    def hook(self, where: str, observe: Callable[..., None]) -> Callable[..., None]:
        """Return ``observe`` as a hook that never raises, and does nothing once capture has ended."""

        def contained(*args: Any) -> None:
            if self.failure is None:
                try:
                    observe(*args)
                except Exception as error:  # noqa: BLE001  as above
                    self.failed(where, error)

        return contained

    def call(
        self,
        where: str,
        wrapper: Wrapper,
        wrapped: Callable[..., Any],
        instance: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call ``wrapped`` through an observing ``wrapper``: once, with its own result.

        Raises:
            BaseException: what ``wrapped`` raises, what is meant for the user, and what ends the process.
        """
        once = _Once(wrapped)
        try:
            return wrapper(once, instance, args, kwargs)
        except BaseException as error:
            if error is once.error or error is self._meant or not isinstance(error, Exception):
                once.error = None  # else it would be in a cycle with its traceback, and keep tensors alive
                raise
            self.failed(where, error)
        theirs, once.error = once.error, None
        if theirs is not None:
            try:
                raise theirs
            finally:
                del theirs
        return once.result if once.called else wrapped(*args, **kwargs)


class _Once:
    """The training's own function, as a wrapper is given it: remembers how the call ended."""

    __slots__ = ("_function", "called", "error", "result")

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.called = False
        self.result: Any = None
        self.error: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called = True
        try:
            self.result = self._function(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise
        return self.result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)
