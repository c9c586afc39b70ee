"""The commands that answer with an examination of runs: check, verify; no logic."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed_precision.records import Examination


def add_examinations(commands: Any) -> None:
    """Add the commands to the parser of all commands."""
    check = commands.add_parser("check", help="what must hold in any correct training, from one run alone")
    check.add_argument("directory", metavar="RUN", help="run directory")
    check.add_argument("--json", action="store_true", help="print JSON")
    check.set_defaults(run=_check)


def _check(arguments: argparse.Namespace) -> int:
    from mindspeed_precision.verify.check import check_run

    return answer(check_run(arguments.directory), json=arguments.json)


def answer(examination: Examination, *, json: bool) -> int:
    """Print what a command found; return its exit status."""
    from mindspeed_precision.report.examination import examination_status, examination_text, show_examination

    if json:
        sys.stdout.write(examination_text(examination))
    else:
        show_examination(examination)
    status, reason = examination_status(examination)
    if reason:
        sys.stderr.write(f"mindspeed-precision: {reason}\n")
    return status
