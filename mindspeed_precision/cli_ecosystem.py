"""The commands that meet what users already have: export; no logic."""

from __future__ import annotations

import argparse
from typing import Any

from mindspeed_precision.cli_examine import answer


def add_ecosystem_commands(commands: Any) -> None:
    """Add the commands to the parser of all commands."""
    export = commands.add_parser(
        "export", help="the statistics of each step for TensorBoard or Weights & Biases"
    )
    export.add_argument("directory", metavar="RUN", help="run directory")
    export.add_argument("--tensorboard", default="", metavar="DIR", help="write event files below DIR")
    export.add_argument("--wandb", default="", metavar="PROJECT", help="write runs of PROJECT, offline")
    export.add_argument("--json", action="store_true", help="print JSON")
    export.set_defaults(run=_export)


def _export(arguments: argparse.Namespace) -> int:
    from mindspeed_precision.export import export_run
    from mindspeed_precision.report.progress import progress_bar

    with progress_bar(wanted=not arguments.json) as progress:
        found = export_run(
            arguments.directory,
            tensorboard=arguments.tensorboard,
            wandb=arguments.wandb,
            progress=progress,
        )
    return answer(found, json=arguments.json)


__all__ = ["add_ecosystem_commands"]
