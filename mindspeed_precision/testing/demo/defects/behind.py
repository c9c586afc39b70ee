"""Run a script with something put in place before it starts."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path


def run_behind(variants: Mapping[str, Callable[[], None]]) -> None:
    """Read ``VARIANT SCRIPT ARGS…`` from the command line, put the variant in place, run the script.

    Raises:
        SystemExit: status 2: there is no such variant, or no script.
    """
    name, *script = sys.argv[1:] or [""]
    if name not in variants or not script or not Path(script[0]).is_file():
        sys.stderr.write(f"usage: {Path(sys.argv[0]).name} {'|'.join(variants)} SCRIPT ARGS…\n")
        sys.exit(2)
    variants[name]()
    sys.argv = script
    runpy.run_path(script[0], run_name="__main__")
