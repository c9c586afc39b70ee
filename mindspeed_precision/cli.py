"""The commands; no logic. Exit status: 0 aligned, 1 diverged or a finding of severity error, 2 no answer."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from mindspeed_precision.cli_ecosystem import add_ecosystem_commands
from mindspeed_precision.cli_examine import add_examinations
from mindspeed_precision.cli_launch import add_launch_commands, split_launch
from mindspeed_precision.cli_msprobe import add_msprobe
from mindspeed_precision.cli_resources import add_resources, resources_of, say_if_large
from mindspeed_precision.errors import ConfigError, PrecisionError
from mindspeed_precision.report.visible import one_line

PROGRAM = "mindspeed-precision"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = _Parser(
        prog=PROGRAM, description="Find the first tensor at which two training runs diverge, and prove why."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    compare = commands.add_parser(
        "compare", help="align and compare two runs, and say where and why they differ"
    )
    compare.add_argument(
        "baseline", metavar="BASELINE", help="run directory to agree with, or dump of msprobe"
    )
    compare.add_argument(
        "candidate", metavar="CANDIDATE", help="run directory to examine, or dump of msprobe"
    )
    compare.add_argument(
        "--policy",
        help="what counts as aligned: a name or a YAML file (exact; cross_framework for runs of different "
        "frameworks, cross_layout for different parallel layouts)",
    )
    compare.add_argument(
        "--mapping",
        metavar="FILE",
        action="append",
        default=[],
        help="names and conventions that differ between the runs (docs/mapping.md); may be repeated",
    )
    compare.add_argument(
        "--calibrate",
        metavar="RUN",
        action="append",
        default=[],
        help="a run of the baseline with perturbed parameters (perturb.epsilon=auto): tolerances are a "
        "multiple of what rounding did there (docs/tolerance.md); may be repeated",
    )
    compare.add_argument(
        "--out", metavar="DIR", help="where to write the report (`compare` beside CANDIDATE)"
    )
    compare.add_argument(
        "--refine",
        nargs="?",
        const="",
        metavar="FILE",
        help="a new file for the settings of a second, short pass that keeps what the proof needs (default: "
        "refine.yaml in the report directory); says so where there is nothing to refine",
    )
    compare.add_argument("--no-replay", action="store_true", help="do not recompute a divergent dW")
    compare.add_argument("--json", action="store_true", help="print verdict.json instead of text")
    add_resources(compare)
    compare.set_defaults(run=_compare)

    add_examinations(commands)
    add_launch_commands(commands)
    add_msprobe(commands)

    show = commands.add_parser("show", help="look inside a run")
    show.add_argument("directory", metavar="RUN", help="run directory, or dump of msprobe")
    show.add_argument("--fqn", default="*", metavar="GLOB", help="only these modules and parameters")
    show.add_argument("--role", default="*", help="only this role (wgrad, param, output …)")
    show.add_argument("--step", type=int, help="only this step; -1 is before the first")
    show.add_argument("--json", action="store_true", help="print JSON")
    show.set_defaults(run=_show)

    add_ecosystem_commands(commands)

    patches = commands.add_parser("patches", help="what is patched where and why")
    actions = patches.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, run, about in (
        ("list", _patches_list, "every declaration"),
        ("check", _patches_check, "what each finds on this machine"),
        ("explain", _patches_explain, "what one patch does, and why"),
    ):
        action = actions.add_parser(name, help=about)
        action.add_argument("--json", action="store_true", help="print JSON")
        action.set_defaults(run=run)
    actions.choices["explain"].add_argument("name", metavar="NAME")
    actions.choices["check"].add_argument(
        "--against",
        metavar="TREE",
        action="append",
        default=[],
        help="source tree of Megatron-LM or MindSpeed to read instead, importing nothing; may be repeated",
    )

    about = "what this interpreter can train with: framework, NPU, versions; imports what is installed"
    environment = commands.add_parser("environment", help=about)
    environment.add_argument("--json", action="store_true", help="print JSON")
    environment.set_defaults(run=_environment)

    demo = commands.add_parser("demo", help="a precision problem on this machine: real trainings, explained")
    demo.add_argument(
        "case", nargs="?", default="glm4", metavar="CASE", help="which; see --list (default: %(default)s)"
    )
    demo.add_argument("--list", action="store_true", help="say what each case shows, and run none")
    demo.add_argument("--out", metavar="DIR", help="where to keep the runs and the report")
    demo.add_argument("--json", action="store_true", help="print its verdicts as JSON, the rest to stderr")
    demo.set_defaults(run=_demo)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None for the process's own.

    Returns:
        The exit status.
    """
    words, launch = split_launch(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in words
    try:
        arguments = build_parser().parse_args(words)
        arguments.launch = launch
        status = arguments.run(arguments)
        sys.stdout.flush()
    except PrecisionError as error:
        return refused(error, words, as_json=as_json)
    except KeyboardInterrupt:
        sys.stderr.write(f"{PROGRAM}: interrupted\n")
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of a pipe went away: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return int(status)


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints a machine can read too, and which takes options written in full alone."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Print the usage; raise the complaint."""
        self.print_usage(sys.stderr)
        raise ConfigError(message, remedy=f"see `{self.prog} --help`")


def refused(error: PrecisionError, words: Sequence[str], *, as_json: bool) -> int:
    """Print why there is no answer: a line on stderr, and with ``--json`` an object on stdout; return 2."""
    line = one_line(" ".join(str(error).split()))
    sys.stderr.write(f"{PROGRAM}: {line}\n")
    if as_json:
        command = next((word for word in words if word[:1] != "-"), "")
        fields = {name: str(value) for name, value in asdict(error).items()}
        return _json({"schema": 1, "command": command, "error": type(error).__name__, **fields}, 2)
    return 2


def _compare(arguments: argparse.Namespace) -> int:
    from mindspeed_precision.dump.object_store import beside
    from mindspeed_precision.flow import compare_in_full
    from mindspeed_precision.report.console import show
    from mindspeed_precision.report.exit_status import exit_status
    from mindspeed_precision.report.files import publish
    from mindspeed_precision.report.place import require_report_place
    from mindspeed_precision.report.progress import progress_bar
    from mindspeed_precision.report.refine_file import nothing_to_refine, require_new
    from mindspeed_precision.report.verdict_json import verdict_text

    out = Path(arguments.out or beside(arguments.candidate) / "compare")
    require_report_place(out, [arguments.baseline, arguments.candidate, *arguments.calibrate])
    resources = resources_of(arguments)
    refine = Path(arguments.refine) if arguments.refine else None
    if refine is not None:
        require_new(refine)
    with progress_bar(wanted=not arguments.json) as progress:
        compared = compare_in_full(
            arguments.baseline,
            arguments.candidate,
            policy=arguments.policy,
            mapping=arguments.mapping,
            calibrate=arguments.calibrate,
            replay=not arguments.no_replay,
            resources=resources,
            progress=progress,
        )
    for said in filter(None, (compared.note, compared.folded and compared.folded.describe())):
        sys.stderr.write(f"{PROGRAM}: {said}\n")
    diagnosis, files = publish(
        compared.diagnosis,
        out,
        runs=compared.runs,
        mappings=compared.mappings,
        refine=refine,
        folded=compared.folded,
    )
    if arguments.json:
        sys.stdout.write(verdict_text(diagnosis, config=files.get("refine", "")))
    else:
        show(diagnosis, files, asked=arguments.refine is not None)
    if arguments.refine is not None and diagnosis.refinement is None:
        sys.stderr.write(f"{PROGRAM}: {one_line(nothing_to_refine(diagnosis))}\n")
    status, reason = exit_status(diagnosis)
    if reason:
        sys.stderr.write(f"{PROGRAM}: {one_line(reason)}\n")
    return status


def _show(arguments: argparse.Namespace) -> int:
    from mindspeed_precision.loading import load_run
    from mindspeed_precision.report.show import Asked, show_json, show_text

    asked = Asked(fqn=arguments.fqn, role=arguments.role, step=arguments.step)
    if asked.all:
        say_if_large([arguments.directory], "every record is shown (fewer: --fqn, --role, --step)")
    run = load_run(arguments.directory, wanted=asked)
    records = asked.shown(run)
    sys.stdout.write(show_json(records) if arguments.json else show_text(run, records))
    return 0


def _patches_list(arguments: argparse.Namespace) -> int:
    from mindspeed_precision.patching.explain import list_rows
    from mindspeed_precision.report.patches import list_text

    if arguments.json:
        return _json([asdict(row) for row in list_rows()])
    sys.stdout.write(list_text(list_rows()) + "\n")
    return 0


def _patches_check(arguments: argparse.Namespace) -> int:
    from mindspeed_precision.report.patches import check_text

    if arguments.against:
        from mindspeed_precision.patching.against import check_against

        rows = check_against(arguments.against)
    else:
        from mindspeed_precision.backends.npu import require_torch
        from mindspeed_precision.patching.explain import check_rows

        require_torch()  # what then fails to import would not say why, once for each patch
        rows = check_rows()
    status = int(any(row.refused for row in rows))
    if arguments.json:
        return _json([asdict(row) for row in rows], status)
    place = "in these trees" if arguments.against else "here"
    sys.stdout.write(check_text(rows, place=place) + "\n")
    return status


def _patches_explain(arguments: argparse.Namespace) -> int:
    from mindspeed_precision.patching.explain import explain

    text = explain(arguments.name)
    if arguments.json:
        return _json({"name": arguments.name, "text": text})
    sys.stdout.write(text + "\n")
    return 0


def _environment(arguments: argparse.Namespace) -> int:
    from mindspeed_precision.backends.survey import survey
    from mindspeed_precision.report.environment import environment_text

    found = survey()
    if arguments.json:
        return _json(asdict(found))
    sys.stdout.write(environment_text(found.rows()) + "\n")
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from mindspeed_precision.testing.demo.command import listing, run

    if arguments.list:
        sys.stdout.write(listing())
        return 0
    if not arguments.json:
        return run(arguments.case, out=arguments.out).status
    with redirect_stdout(sys.stderr):
        result = run(arguments.case, out=arguments.out)
    return _json(result.verdicts(), result.status)


def _json(value: Any, status: int = 0) -> int:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")
    return status


__all__ = ["build_parser", "main"]
