"""Run a script under the CPU layer: ``python -m mindspeed_precision.testing.cpu SCRIPT ARGS...``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from mindspeed_precision.errors import PrecisionError
from mindspeed_precision.testing import cpu

USAGE = "usage: python -m mindspeed_precision.testing.cpu [--without PIECE]... SCRIPT ARGS..."


def main(arguments: list[str]) -> None:
    """Install the layer and run ``SCRIPT`` as ``__main__`` with its own arguments and directory."""
    left_out = []
    while len(arguments) > 1 and arguments[0] == "--without":
        left_out.append(arguments[1])
        arguments = arguments[2:]
    if not arguments or not Path(arguments[0]).is_file():
        sys.exit(USAGE if not arguments else f"{arguments[0]}: no such script; {USAGE}")
    try:
        cpu.install(except_pieces=left_out)
    except PrecisionError as error:
        sys.exit(str(error))
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)  # where python itself would have put it
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
