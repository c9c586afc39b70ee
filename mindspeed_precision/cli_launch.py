"""The commands that take a launch behind ``--``: preflight, shrink, certify; no logic."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_precision.cli_examine import answer
from mindspeed_precision.cli_resources import say_if_large
from mindspeed_precision.errors import ConfigError

TAKE_A_LAUNCH = ("preflight", "shrink", "certify")


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
    preflight.set_defaults(run=_preflight)

    about = "the smallest launch that keeps the structure of this one and fits one node"
    shrink = commands.add_parser("shrink", help=about, usage="%(prog)s [--devices N] [--halve] -- LAUNCH …")
    shrink.add_argument("--devices", type=int, default=8, metavar="N", help="of the node (%(default)s)")
    shrink.add_argument("--halve", action="store_true", help="halve parallel sizes that do not fit")
    shrink.add_argument(
        "--vocabulary", type=int, metavar="N", help="rows of the embedding; every token below"
    )
    shrink.add_argument("--json", action="store_true", help="print JSON")
    shrink.set_defaults(run=_shrink)

    about = "that a training repeats bit for bit, and goes on from a checkpoint as if unbroken"
    certify = commands.add_parser(
        "certify",
        help=about,
        usage="%(prog)s [--out DIR] RUN RUN2 | FULL FIRST RESUMED | [--steps N] [--resume-at N] -- LAUNCH …",
    )
    certify.add_argument(
        "runs", nargs="*", metavar="RUN", help="two runs; or the whole one and its two parts"
    )
    certify.add_argument("--out", metavar="DIR", help="where certificate.json goes, and the runs of a launch")
    certify.add_argument("--steps", type=int, metavar="N", help="steps of a run (else as the launch says)")
    certify.add_argument(
        "--resume-at", type=int, metavar="N", help="run also N steps, save, load, and go on from there"
    )
    certify.add_argument("--json", action="store_true", help="print JSON")
    certify.set_defaults(run=_certify)


def _preflight(arguments: argparse.Namespace) -> int:
    from mindspeed_precision.preflight import preflight

    return answer(preflight(arguments.launch, backend=arguments.backend), json=arguments.json)


def _shrink(arguments: argparse.Namespace) -> int:
    from mindspeed_precision.shrink import shrink

    shrunk = shrink(
        arguments.launch,
        devices=arguments.devices,
        halve=arguments.halve,
        vocabulary=arguments.vocabulary,
    )
    return answer(shrunk, json=arguments.json)


def _certify(arguments: argparse.Namespace) -> int:
    from mindspeed_precision.certify import certify_launch, certify_runs, examination_of, write_certificate
    from mindspeed_precision.dump.object_store import beside

    if bool(arguments.runs) == bool(arguments.launch):
        raise ConfigError("give runs, or a launch behind --", where="certify", expected="one of the two")
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    if arguments.launch:
        out = arguments.out or Path("runs") / f"certify-{stamp}"
        certificate = certify_launch(
            arguments.launch, out=out, steps=arguments.steps, resume_at=arguments.resume_at
        )
    else:
        out = arguments.out or beside(arguments.runs[-1]) / "certify"
        say_if_large(arguments.runs, "every record is compared in memory")
        certificate = certify_runs(*arguments.runs)
    file = write_certificate(certificate, out)
    return answer(examination_of(certificate, file=str(file)), json=arguments.json)


__all__ = ["add_launch_commands", "split_launch"]
