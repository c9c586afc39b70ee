"""Run a script on MindSpore CPU: ``python -m mindspeed_precision.testing.mindtorch SCRIPT ARGS...``."""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import traceback

from mindspeed_precision.errors import PrecisionError
from mindspeed_precision.testing import mindtorch
from mindspeed_precision.testing.launcher import refuse, script_and_pieces

USAGE = "usage: python -m mindspeed_precision.testing.mindtorch [--without PIECE]... SCRIPT ARGS..."


def main(arguments: list[str]) -> None:
    """Install the layer and run ``SCRIPT`` as ``__main__`` with its own arguments and directory."""
    script, left_out = script_and_pieces(arguments, USAGE)
    try:
        mindtorch.install(except_pieces=left_out)
    except PrecisionError as error:
        refuse(str(error))
    sys.argv = script
    leave(_status_of(script[0]))


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
