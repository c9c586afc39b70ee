"""The arguments of this process, as Megatron keeps them: ``get_args``."""

from __future__ import annotations

from argparse import Namespace

_GLOBAL_ARGS: Namespace | None = None


def get_args() -> Namespace:
    """Return the arguments.

    Raises:
        AssertionError: nobody has set them yet.
    """
    assert _GLOBAL_ARGS is not None, "args is not initialized."
    return _GLOBAL_ARGS


def set_args(args: Namespace) -> None:
    """Set the arguments of this process."""
    global _GLOBAL_ARGS  # noqa: PLW0603 (Megatron's own way to keep them; others read this name)
    _GLOBAL_ARGS = args


def get_timers() -> None:
    """Return None: the loop keeps no timers, and megatron-core takes None for that."""
