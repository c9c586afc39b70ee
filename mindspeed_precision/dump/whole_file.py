"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from mindspeed_precision.permissions import open_new


@contextmanager
def whole_file(path: Path, *, first: bool = False) -> Iterator[IO[bytes]]:
    """Open a file under a temporary name; flush it to the disk and rename it when the block ends well.

    Where the block, the disk or the rename fails, what was written is removed: it may fill the disk.

    Args:
        path: the file.
        first: of several processes that write it, one succeeds (where the file system has hard links).

    Raises:
        FileExistsError: another was first.
        OSError: the disk is full or not writable, or cannot rename.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part" if first else f"{path.name}.part")
    try:
        with open_new(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if not (first and _linked(temporary, path)):
            temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _linked(temporary: Path, path: Path) -> bool:
    """Give a file its name unless another has it; tell whether this file system can."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:
        return False
    temporary.unlink()
    return True
