"""What is written has the permissions that the umask leaves, and never may everybody change it.

A container whose umask is 000 would leave runs and reports that anybody can rewrite.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

_FILE = 0o664
_DIRECTORY = 0o775


def make_directory(path: Path, *, exist_ok: bool = False) -> None:
    """Make a directory, and those above it.

    Raises:
        FileExistsError: it is there, and may not be, or is no directory.
        OSError: it cannot be made.
    """
    try:
        path.mkdir(mode=_DIRECTORY, exist_ok=exist_ok)
    except FileNotFoundError:
        if path.parent == path:
            raise
        make_directory(path.parent, exist_ok=True)
        path.mkdir(mode=_DIRECTORY, exist_ok=exist_ok)


def open_new(path: Path, mode: str, *, permissions: int = _FILE, **options: Any) -> IO[Any]:
    """Open a file to write it; as ``open`` does.

    Args:
        path: the file; where it exists it keeps its permissions.
        mode: ``w`` or ``x``, with ``b`` for bytes.
        permissions: of which the umask leaves some.
        options: of ``open``.

    Raises:
        OSError: it cannot be opened.
    """
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, permissions), **options)


def write_text(path: Path, text: str, *, permissions: int = _FILE, errors: str = "strict") -> None:
    """Write a file of text, in UTF-8.

    Raises:
        OSError: it cannot be written.
    """
    with open_new(path, "w", permissions=permissions, encoding="utf-8", errors=errors) as file:
        file.write(text)
