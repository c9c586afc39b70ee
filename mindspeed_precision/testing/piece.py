"""The form of one piece of the layer: what it stands in for, and what happens without it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import wrapt


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One difference between a CUDA device and a CPU that Megatron meets.

    Attributes:
        name: short and stable; ``install(except_pieces=...)`` takes it.
        why: what Megatron relies on, and what the piece does about it.
        error_without: what is seen when the piece is missing; begins with ``silent:`` when nothing is seen
            but the numbers are wrong.
        when: the configurations that meet it; ``every run`` when all do.
        versions: the versions of megatron-core that meet it, as a requirement (``>=0.16``); empty for all.
        optional: True when training works without it as well.
        apply: sets it up; called once.
    """

    name: str
    why: str
    error_without: str
    when: str
    apply: Callable[[], None]
    versions: str = ""
    optional: bool = False


def after_import(module_name: str, patch: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Return a function that patches ``module_name`` right after its body has run.

    The patch comes before anybody can say ``from module_name import name``, so no binding escapes it.
    """

    def register() -> None:
        wrapt.register_post_import_hook(patch, module_name)

    return register


def megatron_is_imported() -> bool:
    """Tell whether a part of Megatron was imported already, so that names may be bound past the layer."""
    return any(name in sys.modules for name in ("megatron.core", "megatron.training", "megatron.legacy"))
