"""The form of one piece of the compatibility layer: a piece that says whose shortcoming it makes up for."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mindspeed_precision.testing.piece import Piece


class Mends(str, Enum):
    """Whose shortcoming a piece makes up for."""

    MINDTORCH = "mindtorch"
    MINDSPORE_CPU = "MindSpore CPU"
    MEGATRON = "Megatron without an accelerator"


@dataclass(frozen=True, kw_only=True)
class CompatPiece(Piece):
    """One change to mindtorch, MindSpore or Megatron.

    Attributes:
        mends: whose shortcoming it makes up for.
        changes: the names that are replaced or set.
    """

    mends: Mends
    changes: tuple[str, ...]


def load(name: str) -> Any:
    """Return the module ``name``, imported now: MindSpore and mindtorch may not be imported earlier."""
    return importlib.import_module(name)
