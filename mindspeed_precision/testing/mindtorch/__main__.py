"""Run a script on MindSpore CPU: ``python -m mindspeed_precision.testing.mindtorch SCRIPT ARGS...``."""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from mindspeed_precision.errors import PrecisionError
from mindspeed_precision.testing import mindtorch

USAGE = "usage: python -m mindspeed_precision.testing.mindtorch [--without PIECE]... SCRIPT ARGS..."


def main(arguments: list[str]) -> None:
    """Install the layer and run ``SCRIPT`` as ``__main__`` with its own arguments and directory."""
    left_out = []
    while len(arguments) > 1 and arguments[0] == "--without":
        left_out.append(arguments[1])
        arguments = arguments[2:]
    if not arguments or not Path(arguments[0]).is_file():
        _refuse(USAGE if not arguments else f"{arguments[0]}: no such script; {USAGE}")
    sys.path[0] = str(Path(arguments[0]).resolve().parent)  # where python itself would have put it
    try:
        mindtorch.install(except_pieces=left_out)
    except PrecisionError as error:
        _refuse(str(error))
    sys.argv = arguments
    leave(_status_of(arguments[0]))


def _refuse(message: str) -> NoReturn:
    sys.stderr.write(f"{message}\n")
    sys.exit(2)


def _status_of(script: str) -> int:
    """Run the script to its end; return its exit status, its traceback or message having been printed."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        sys.stderr.write(f"{error.code}\n")
        return 1
    except BaseException:  # noqa: BLE001 (any end of the script must come past `leave`)
        traceback.print_exc()
        return 1
    return 0


def leave(status: int) -> None:
    """End the process with ``status``, without MindSpore's teardown.

    Its destructors abort now and then after a good run ("malloc_consolidate(): unaligned fastbin chunk"),
    which would turn a good exit status into a bad one. What Python registered to run at exit is run, and
    the streams are flushed, before.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
