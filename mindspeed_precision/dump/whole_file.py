"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from mindspeed_precision.permissions import open_new


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file under a temporary name; flush it to the disk and rename it when the block ends well.

    Where the block, the disk or the rename fails, what was written is removed: it may fill the disk.

    Raises:
        OSError: the disk is full or not writable, or cannot rename.
    """
    temporary = path.with_name(path.name + ".part")
    try:
        with open_new(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
