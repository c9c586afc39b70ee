"""The commands that take a launch behind ``--``: preflight, shrink, certify; no logic."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from mindspeed_precision.cli_examine import answer

TAKE_A_LAUNCH = ("preflight",)


def split_launch(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a command line without the launch, and the launch: what stands behind ``--``."""
    words = list(argv)
    if not words or words[0] not in TAKE_A_LAUNCH or "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def add_launch_commands(commands: Any) -> None:
    """Add the commands to the parser of all commands."""
    about = "what will bite in a launch: environment, arguments, versions; starts nothing"
    preflight = commands.add_parser(
        "preflight", help=about, usage="%(prog)s [--backend B] [--json] [-- LAUNCH …]"
    )
    preflight.add_argument(
        "--backend", help="pta, mindspore, cuda or cpu; else from the launch and what is installed"
    )
    preflight.add_argument("--json", action="store_true", help="print JSON")
    preflight.set_defaults(run=_preflight, launch=[])


def _preflight(arguments: argparse.Namespace) -> int:
    from mindspeed_precision.preflight import preflight

    return answer(preflight(arguments.launch, backend=arguments.backend), json=arguments.json)


__all__ = ["add_launch_commands", "split_launch"]
