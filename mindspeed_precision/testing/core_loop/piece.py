"""The piece of a layer that offers the loop as ``megatron.training`` where no other is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from mindspeed_precision.testing.piece import Piece

NAME = "megatron.training"
FOLDER = Path(__file__).parent / "training"
NOTICE = (
    "mindspeed-precision: this megatron-core ships no megatron.training; mindspeed_precision's own test loop "
    "stands in for it (testing/core_loop: fp32, no DDP wrapper, gradients in .grad)\n"
)


class LoopFinder(MetaPathFinder):
    """Finds ``megatron.training``; last on ``sys.meta_path``: asked only when nobody else found one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the loop's package for ``megatron.training``, None for anything else."""
        if fullname != NAME:
            return None
        sys.stderr.write(NOTICE)
        return importlib.util.spec_from_file_location(
            NAME, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
        )


def offer_loop() -> None:
    """Let ``import megatron.training`` find the loop, after everything that could find another one."""
    if not any(isinstance(finder, LoopFinder) for finder in sys.meta_path):
        sys.meta_path.append(LoopFinder())


PIECE = Piece(
    name="core_loop",
    why="Wheels of megatron-core before 0.17 ship no megatron.training. A loop of our own stands in for it, "
    "around megatron-core's model, schedules, parallel state and optimizer wrapper.",
    error_without="ModuleNotFoundError: No module named 'megatron.training'",
    when="a wheel of megatron-core without a checkout of Megatron-LM",
    versions="<0.17",
    apply=offer_loop,
)
