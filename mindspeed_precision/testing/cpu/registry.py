"""Every piece in the order in which it is applied, and the one function that applies them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mindspeed_precision.errors import ConfigError, PatchError
from mindspeed_precision.testing.core_loop.piece import PIECE as CORE_LOOP
from mindspeed_precision.testing.cpu import cuda, device, distributed, environment, megatron, randomness
from mindspeed_precision.testing.piece import Piece, megatron_is_imported

PIECES: tuple[Piece, ...] = (
    *environment.PIECES,
    *device.PIECES,
    *cuda.PIECES,
    *distributed.PIECES,
    *randomness.PIECES,
    *megatron.PIECES,
    CORE_LOOP,
)

_installed: list[str] = []


def has_real_accelerator() -> bool:
    """Tell whether a real CUDA device is there; False once the layer pretends that one is."""
    return bool(not _installed and torch.cuda.is_available())


def install(except_pieces: Iterable[str] = ()) -> bool:
    """Let Megatron run on this CPU, over gloo: for tests and the demo.

    Call it before anything of Megatron is imported. A second call does nothing. Nothing is undone: the
    process is a test's or the demo's own.

    Args:
        except_pieces: names of pieces to leave out, to see what each is for.

    Returns:
        True when the layer is in place, False on a machine with a real CUDA device, where nothing is done.

    Raises:
        ConfigError: a name is not that of a piece.
        PatchError: Megatron is imported already.
    """
    left_out = set(except_pieces)
    if unknown := left_out - {piece.name for piece in PIECES}:
        known = ", ".join(piece.name for piece in PIECES)
        raise ConfigError("no such piece of the CPU layer", found=", ".join(sorted(unknown)), expected=known)
    if _installed:
        return True
    if has_real_accelerator():
        return False
    if megatron_is_imported():
        raise PatchError(
            "the CPU layer came too late: Megatron is imported already",
            where="mindspeed_precision.testing.cpu",
            remedy="call cpu.install() before the first import of megatron",
        )
    for piece in PIECES:
        if piece.name not in left_out:
            piece.apply()
            _installed.append(piece.name)
    return True


def installed_pieces() -> tuple[str, ...]:
    """Return the names of the pieces that are in place in this process."""
    return tuple(_installed)
