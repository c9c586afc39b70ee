"""Files of a run are read from inside it: no link that leads out is followed, and nothing is waited for."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from mindspeed_precision.dump.object_store import bring
from mindspeed_precision.errors import DumpError


def require_inside(path: Path, run: Path) -> None:
    """Refuse what is no ordinary file or directory inside ``run``; of a run elsewhere, copy it first.

    Args:
        path: may be absent.
        run: the run directory, which may itself be reached by a link.

    Raises:
        DumpError: a link leads out of the run, or it is a pipe or a device; or it cannot be copied from where
            the run lies.
    """
    bring(path)
    try:
        real, root = os.path.realpath(path), os.path.realpath(run)
        kind = path.stat().st_mode if os.path.lexists(path) else stat.S_IFREG
    except ValueError as error:
        raise DumpError(f"no name of a file: {error}", where=str(run), found=repr(str(path))) from error
    except OSError as error:
        raise DumpError(f"cannot read: {error.strerror}", where=str(path)) from error
    if os.path.commonpath([real, root]) != root:
        raise DumpError(
            "a link leads out of the run",
            where=str(path),
            found=real,
            expected=f"a file inside {run}",
            remedy="copy what it points to into the run",
        )
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        raise DumpError("not a file", where=str(path), found=stat.filemode(kind), expected="a regular file")


def read_inside(path: Path, run: Path) -> bytes:
    """Return the content of a file of a run.

    Raises:
        DumpError: it cannot be read, or a link leads out of the run.
    """
    require_inside(path, run)
    try:
        return path.read_bytes()
    except OSError as error:
        raise DumpError(f"cannot read: {error.strerror}", where=str(path)) from error
