"""Run a script under the CPU layer: ``python -m mindspeed_precision.testing.cpu SCRIPT ARGS...``."""

from __future__ import annotations

import runpy
import sys

from mindspeed_precision.errors import PrecisionError
from mindspeed_precision.testing import cpu
from mindspeed_precision.testing.launcher import refuse, script_and_pieces

USAGE = "usage: python -m mindspeed_precision.testing.cpu [--without PIECE]... SCRIPT ARGS..."


def main(arguments: list[str]) -> None:
    """Install the layer and run ``SCRIPT`` as ``__main__`` with its own arguments and directory."""
    script, left_out = script_and_pieces(arguments, USAGE)
    try:
        cpu.install(except_pieces=left_out)
    except PrecisionError as error:
        refuse(str(error))
    sys.argv = script
    runpy.run_path(script[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
