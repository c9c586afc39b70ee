"""The commands about msprobe: export, config; no logic."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any


def add_msprobe(commands: Any) -> None:
    """Add the commands to the parser of all commands."""
    about = "write a run as a dump of msprobe, translate its configurations; compare and show read its dumps"
    msprobe = commands.add_parser("msprobe", help=about)
    actions = msprobe.add_subparsers(dest="action", metavar="ACTION", required=True)

    export = actions.add_parser(
        "export", help="write a run as a dump that msprobe's compare and graph_visualize read"
    )
    export.add_argument("directory", metavar="RUN", help="run directory")
    export.add_argument("--out", required=True, metavar="DIR", help="the dump; a new directory")
    export.add_argument(
        "--like",
        metavar="DUMP",
        help="a dump of msprobe of the same training: classes and wrappers are named as there, "
        "and elements are written where it has some: msprobe compares dumps of one task",
    )
    export.add_argument("--json", action="store_true", help="print JSON")
    export.set_defaults(run=_export)

    config = actions.add_parser("config", help="translate a configuration of msprobe to settings of ours")
    config.add_argument("file", metavar="FILE", help="config.json, config_pt.json, config_ms.json")
    config.add_argument("--out", metavar="FILE", help="a new YAML file (default: print it)")
    config.add_argument("--json", action="store_true", help="print settings, and what became of each key")
    config.set_defaults(run=_config)


def _export(arguments: argparse.Namespace) -> int:
    from mindspeed_precision.counting import count
    from mindspeed_precision.dump.reader import load_run
    from mindspeed_precision.msprobe.export import export_run
    from mindspeed_precision.report.visible import one_line

    found = export_run(load_run(arguments.directory), arguments.out, like=arguments.like)
    if arguments.json:
        plain = {"directory": str(found.directory), "task": found.task, "entries": found.entries}
        sys.stdout.write(json.dumps({**plain, "notes": found.notes}, indent=1) + "\n")
        return 0
    lines = [f"{found.directory}: {count(found.entries, 'entry')}, task {found.task}"]
    lines += [f"  note: {note}" for note in found.notes]
    sys.stdout.write("".join(f"{one_line(line)}\n" for line in lines))
    return 0


def _config(arguments: argparse.Namespace) -> int:
    from mindspeed_precision.msprobe.config import load_config, write_config

    found = load_config(arguments.file)
    if arguments.out:
        write_config(found, arguments.out, source=arguments.file)
    if arguments.json:
        plain = {"settings": found.settings, "became": found.became, "without": found.without}
        sys.stdout.write(json.dumps(plain, indent=1) + "\n")
    elif arguments.out:
        sys.stdout.write("".join(f"{line}\n" for line in [f"{arguments.out}:", *found.lines()]))
    else:
        sys.stdout.write(found.yaml(arguments.file))
    return 0
