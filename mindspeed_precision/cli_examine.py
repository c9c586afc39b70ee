"""The commands that answer with an examination: check, verify, ckpt; no logic."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from mindspeed_precision.cli_resources import add_resources, resources_of, say_if_large

if TYPE_CHECKING:
    from mindspeed_precision.records import Examination


def add_examinations(commands: Any) -> None:
    """Add the commands to the parser of all commands."""
    check = commands.add_parser("check", help="what must hold in any correct training, from one run alone")
    check.add_argument("directory", metavar="RUN", help="run directory")
    check.add_argument("--json", action="store_true", help="print JSON")
    add_resources(
        check,
        memory="runs that need more are checked in parts, each law of the ranks that it links "
        "(docs/scale.md; default: %(default)s)",
    )
    check.set_defaults(run=_check)

    verify = commands.add_parser(
        "verify", help="whether two runs have the same configuration, groups, environment, data and weights"
    )
    verify.add_argument("baseline", metavar="BASELINE", help="run directory to agree with")
    verify.add_argument("candidate", metavar="CANDIDATE", help="run directory to examine")
    about = "names that differ; may be repeated (docs/mapping.md)"
    verify.add_argument("--mapping", action="append", default=[], metavar="FILE", help=about)
    for side in ("baseline", "candidate"):
        verify.add_argument(
            f"--{side}-config",
            metavar="FILE",
            help=f"YAML with which the {side} was launched, where its run.json does not say (MindFormers)",
        )
    verify.add_argument("--all", action="store_true", help="show every parameter, not only those that differ")
    verify.add_argument("--json", action="store_true", help="print JSON, with every parameter")
    verify.set_defaults(run=_verify)

    ckpt = commands.add_parser(
        "ckpt",
        help="two checkpoints, or a run and a checkpoint, parameter by parameter, of any format and layout",
    )
    form = "torch, Megatron (torch, torch_dist), safetensors, Hugging Face, MindSpore, or a run directory"
    ckpt.add_argument("baseline", metavar="A", help=f"checkpoint to agree with: {form}")
    ckpt.add_argument("candidate", metavar="B", help="checkpoint to examine: the same")
    about = "names that the shipped table does not know; may be repeated (docs/ckpt.md)"
    ckpt.add_argument("--mapping", action="append", default=[], metavar="FILE", help=about)
    ckpt.add_argument("--all", action="store_true", help="show every parameter, not only those that differ")
    ckpt.add_argument("--json", action="store_true", help="print JSON, with every parameter")
    ckpt.set_defaults(run=_ckpt)


def _check(arguments: argparse.Namespace) -> int:
    from mindspeed_precision.report.progress import progress_bar
    from mindspeed_precision.verify.check import check_run

    resources = resources_of(arguments)
    with progress_bar(wanted=not arguments.json) as progress:
        found = check_run(arguments.directory, resources=resources, progress=progress)
    return answer(found, json=arguments.json)


def _verify(arguments: argparse.Namespace) -> int:
    from mindspeed_precision.records import Side
    from mindspeed_precision.verify.verify import verify_runs

    given = {side: getattr(arguments, f"{side.value}_config") for side in Side}
    if arguments.mapping:
        say_if_large([arguments.baseline, arguments.candidate], "a mapping may rename any record")
    found = verify_runs(
        arguments.baseline,
        arguments.candidate,
        mapping=arguments.mapping,
        configurations={side: file for side, file in given.items() if file},
        every=arguments.all or arguments.json,
    )
    return answer(found, json=arguments.json)


def _ckpt(arguments: argparse.Namespace) -> int:
    from mindspeed_precision.ckpt.examine import compare_checkpoints

    found = compare_checkpoints(
        arguments.baseline, arguments.candidate, mapping=arguments.mapping, every=arguments.all
    )
    return answer(found.examination, json=arguments.json, parameters=list(found.parameters))


def answer(examination: Examination, *, json: bool, **more: Any) -> int:
    """Print what a command found, ``more`` only as JSON; return its exit status."""
    from mindspeed_precision.report.examination import examination_status, examination_text, show_examination
    from mindspeed_precision.report.visible import one_line

    if json:
        sys.stdout.write(examination_text(examination, **more))
    else:
        show_examination(examination)
    status, reason = examination_status(examination)
    if reason:
        sys.stderr.write(f"mindspeed-precision: {one_line(reason)}\n")
    return status
