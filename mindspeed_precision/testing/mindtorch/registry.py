"""Every piece in the order in which it is applied, and the one function that applies them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable

from mindspeed_precision.errors import ConfigError, PatchError
from mindspeed_precision.testing.core_loop.piece import PIECE as CORE_LOOP
from mindspeed_precision.testing.mindtorch import cuda, distributed, megatron, start, tape, tensors
from mindspeed_precision.testing.piece import Piece, megatron_is_imported

LABEL = (
    "MindSpore CPU through mindtorch; not MSAdapter, not Ascend; no bf16 compute, no sequence parallelism, "
    "no send/recv"
)

PIECES: tuple[Piece, ...] = (
    *start.PIECES,
    *tape.PIECES,
    *tensors.PIECES,
    *cuda.PIECES,
    *distributed.PIECES,
    *megatron.PIECES,
    CORE_LOOP,
)

_installed: list[str] = []


def install(except_pieces: Iterable[str] = ()) -> None:
    """Answer ``import torch`` with MindSpore, and let Megatron run on it; says so on stderr.

    Call it before torch, MindSpore or anything of Megatron is imported. A second call does nothing. Nothing
    is
    undone: the process is a test's or the demo's own.

    Args:
        except_pieces: names of pieces to leave out, to see what each is for.

    Raises:
        ConfigError: a name is not that of a piece.
        PatchError: MindSpore or mindtorch is not installed, or torch or Megatron is imported already.
    """
    left_out = set(except_pieces)
    if unknown := left_out - {piece.name for piece in PIECES}:
        known = ", ".join(piece.name for piece in PIECES)
        raise ConfigError(
            "no such piece of the mindtorch layer", found=", ".join(sorted(unknown)), expected=known
        )
    if _installed:
        return
    _check_environment()
    sys.stderr.write(f"mindspeed-precision: {LABEL}\n")
    for piece in PIECES:
        if piece.name not in left_out:
            piece.apply()
            _installed.append(piece.name)


def _check_environment() -> None:
    where = "mindspeed_precision.testing.mindtorch"
    if "torch" in sys.modules or megatron_is_imported():
        raise PatchError(
            "the mindtorch layer came too late: torch or Megatron is imported already",
            where=where,
            remedy="call mindtorch.install() before the first import of torch or megatron",
        )
    missing = [name for name in ("mindspore", "mindtorch") if importlib.util.find_spec(name) is None]
    if missing:
        raise PatchError(
            "this interpreter cannot run MindSpore under a torch API",
            where=where,
            found=f"no {' and no '.join(missing)}",
            expected="mindspore 2.7.1 and mindnlp 0.5.1, without torch",
            remedy="use the interpreter of .venv-mindspore",
        )


def installed_pieces() -> tuple[str, ...]:
    """Return the names of the pieces that are in place in this process."""
    return tuple(_installed)
