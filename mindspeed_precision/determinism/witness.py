"""Who changed a switch: observers of the calls that can, declared in ``patches/determinism.yaml``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

_INTERNAL = (
    "torch.",
    "wrapt.",
    "mindspeed_precision.determinism.",
    "mindspeed_precision.patching.",
    "contextlib.",
)


@dataclass
class _Memory:
    culprits: dict[str, str] = field(default_factory=dict)
    looking_away: bool = False


_memory = _Memory()


def observe_switch(
    wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call through, and remember the caller for every switch that has another value afterwards."""
    from mindspeed_precision.determinism import algorithms  # it imports this module

    if _memory.looking_away:
        return wrapped(*args, **kwargs)
    before = algorithms.snapshot()
    try:
        return wrapped(*args, **kwargs)
    finally:
        after = algorithms.snapshot()
        changed = [name for name, value in after.items() if value != before.get(name)]
        if changed:
            site = call_site(sys._getframe(1))
            _memory.culprits.update(dict.fromkeys(changed, site))


def call_site(frame: FrameType | None) -> str:
    """Return ``file:line in function`` of the nearest frame that is neither torch's nor ours."""
    while frame is not None:
        module = f"{frame.f_globals.get('__name__', '')}."
        if not module.startswith(_INTERNAL):
            code = frame.f_code
            return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""


def culprit_of(name: str) -> str:
    """Return who last changed the switch ``name`` since ``forget``; empty when nobody was seen."""
    return _memory.culprits.get(name, "")


def forget() -> None:
    """Forget who changed what: the switches have been put back."""
    _memory.culprits.clear()


@contextmanager
def looking_away() -> Iterator[None]:
    """Do not record changes inside the block: they are our own."""
    before, _memory.looking_away = _memory.looking_away, True
    try:
        yield
    finally:
        _memory.looking_away = before
