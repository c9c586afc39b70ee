"""The command line of the launchers that put a layer in place and then run a script."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn


def script_and_pieces(arguments: list[str], usage: str) -> tuple[list[str], list[str]]:
    """Read ``[--without PIECE]... SCRIPT ARGS...``, and let Python find the script's neighbours.

    Args:
        arguments: of the launcher.
        usage: its usage line.

    Returns:
        The script with its own arguments, and the pieces to leave out.

    Raises:
        SystemExit: status 2, after one line on stderr: there is no such script.
    """
    left_out = []
    while len(arguments) > 1 and arguments[0] == "--without":
        left_out.append(arguments[1])
        arguments = arguments[2:]
    if not arguments or not Path(arguments[0]).is_file():
        refuse(usage if not arguments else f"{arguments[0]}: no such script; {usage}")
    sys.path[0] = str(Path(arguments[0]).resolve().parent)  # where python itself would have put it
    return arguments, left_out


def refuse(message: str) -> NoReturn:
    """End with status 2 and one line on stderr."""
    sys.stderr.write(f"{message}\n")
    sys.exit(2)
