"""A file of a checkpoint, mapped into memory: nothing of it is read before it is looked at."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.errors import CheckpointError


class MappedFile:
    """A file, mapped read-only.

    Args:
        path: the file.

    Attributes:
        path: the file.
        size: in bytes.

    Raises:
        CheckpointError: it cannot be opened, or is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                if not os.fstat(file.fileno()).st_size:
                    raise CheckpointError(
                        "the file is empty", where=str(path), remedy="save or copy the checkpoint again"
                    )
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", "") or str(error)
            raise CheckpointError(f"cannot read this file: {reason}", where=str(path)) from error
        self.size = len(self._map)

    def bytes(self, start: int, length: int) -> bytes:
        """Return a copy of some bytes.

        Raises:
            CheckpointError: they are not in the file.
        """
        self._require(start, length)
        return self._map[start : start + length]

    def elements(self, start: int, count: int, width: int) -> NDArray[Any]:
        """Return unsigned integers of a width in bytes, ``[count]``, as a view of the file.

        Raises:
            CheckpointError: they are not in the file.
        """
        self._require(start, count * width)
        found: NDArray[Any] = np.frombuffer(self._map, np.dtype(f"<u{width}"), count, start)
        return found

    def _require(self, start: int, length: int) -> None:
        if start < 0 or length < 0 or start + length > self.size:
            raise CheckpointError(
                "a truncated file, or one that claims more than it has",
                where=str(self.path),
                found=f"{self.size} bytes",
                expected=f"{length} bytes from {start}",
            )


def require_inside(root: Path, path: Path) -> Path:
    """Return a path of a checkpoint, if it really is one.

    Args:
        root: the checkpoint's directory.
        path: something that is found or named in it.

    Raises:
        CheckpointError: it leads out of the directory, by ``..``, as an absolute path or by a link.
    """
    allowed = _allowed(root)
    real = path.resolve()
    if not real.is_relative_to(allowed):
        raise CheckpointError(
            "a path that leads out of the checkpoint",
            where=str(path),
            found=str(real),
            expected=f"something in {allowed}",
            remedy="give the directory in which the files really are",
        )
    return path


def _allowed(root: Path) -> Path:
    """Return the directory that files may be in: of a snapshot in Hugging Face's cache, the repository's."""
    real = root.resolve()
    repository = real.parent.parent
    return repository if real.parent.name == "snapshots" and (repository / "blobs").is_dir() else real


__all__ = ["MappedFile", "require_inside"]
