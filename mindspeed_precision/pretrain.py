"""The drop-in: ``from mindspeed_precision import pretrain`` in place of Megatron's.

Without ``--precision-debug`` it *is* the original function: that function is called with what was given, and
no foreign attribute is touched. With it, a `Session` is opened around the very same call.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from mindspeed_precision.arguments import DebugRequest, command_line, requested
from mindspeed_precision.errors import PrecisionError

Pretrain = Callable[..., Any]

_HOMES = (
    # (loaded by a script of that framework, home of its pretrain); the first that is loaded wins. Packages,
    # not adaptors: those of MindSpeed-LLM changed their names, and MindSpeed-MM has none of its own.
    ("mindspeed_mm", "mindspeed_mm.training"),
    ("mindspeed_llm", "mindspeed_llm.training.training"),
    ("mindspeed_ms.training", "mindspeed_ms.training"),
    ("megatron.training", "megatron.training"),
)


class DropIn:
    """Train as the installed ``pretrain`` does; record the run when ``--precision-debug`` is given.

    Arguments and result are those of the real function, which is found when this one is called:
    MindSpeed-LLM's, MindSpeed-MM's, MindSpeed-Core-MS's or Megatron's, whichever is loaded.
    """

    def __init__(self) -> None:
        self.__name__ = self.__qualname__ = "pretrain"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the real function, recorded where that is asked for."""
        return _run(resolve(), args, kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """The real function's: nvidia-resiliency-ext finds in it the argument that takes its CallWrapper."""
        try:
            return inspect.signature(resolve())
        except PrecisionError as error:
            raise AttributeError(str(error)) from error


pretrain = DropIn()


def wrap(real_pretrain: Pretrain) -> Pretrain:
    """Return a drop-in for a ``pretrain`` of one's own.

    Example::

        pretrain = wrap(my_framework.pretrain)
    """

    @functools.wraps(real_pretrain)
    def wrapped_pretrain(*args: Any, **kwargs: Any) -> Any:
        return _run(real_pretrain, args, kwargs)

    return wrapped_pretrain


def resolve() -> Pretrain:
    """Return the ``pretrain`` that the loaded framework would run.

    Raises:
        PrecisionError: there is none.
    """
    for loaded, home in _HOMES:
        if loaded in sys.modules:
            function: Pretrain = importlib.import_module(home).pretrain
            return function
    try:
        function = importlib.import_module("megatron.training").pretrain
    except ImportError as error:
        raise PrecisionError(
            "no pretrain to stand in for",
            where="mindspeed_precision.pretrain",
            found=str(error),
            expected="megatron.training (Megatron-LM on PYTHONPATH, or megatron-core >= 0.17)",
            remedy="use wrap(your_pretrain) for a loop that lives elsewhere",
        ) from error
    return function


def register_flags_with_megatron() -> None:
    """Make Megatron's parser know our flags, as soon as it is there; nothing without ``--precision-debug``.

    Since 0.18 scripts parse the command line before they call ``pretrain``: this runs when the package is
    imported.
    """
    if requested(command_line()) is not None:
        import wrapt  # a tenth of a second to import: a laptop that compares runs needs none of it

        wrapt.when_imported("megatron.training.arguments")(_patch_parser)


def _patch_parser(module: Any) -> None:
    from mindspeed_precision.patching.declare import load_declarations, select
    from mindspeed_precision.patching.session import PatchSession

    PatchSession(select(load_declarations(), groups=["arguments"])).install()


def _run(real_pretrain: Pretrain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    request = requested(command_line())
    if request is None:
        return real_pretrain(*args, **kwargs)
    with ExitStack() as stack:
        _open_session(request, stack)
        try:
            return real_pretrain(*args, **kwargs)
        except PrecisionError as error:  # a run to begin with that lacks something, a directory that is used
            raise _stopped(error) from error


def _open_session(request: DebugRequest, stack: ExitStack) -> None:
    """Open the session that ``stack`` will close; what stands in the way is one message, no traceback."""
    from mindspeed_precision.backends.detect import check_requested
    from mindspeed_precision.session import Session

    try:
        check_requested(command_line())
        stack.enter_context(Session(settings=request.settings()))
    except PrecisionError as error:
        raise _stopped(error) from error


def _stopped(error: PrecisionError) -> SystemExit:
    """Say in one line what stands in the way; return what ends the process with status 2."""
    sys.stderr.write(f"mindspeed-precision: {error}\n")
    return SystemExit(2)


register_flags_with_megatron()
