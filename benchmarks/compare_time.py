"""What it costs to compare two recorded steps: CPU seconds of the command, import included."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

VARIANT = Path(__file__).with_name("variant.py")
REPEATS = 4
"""Times that the commands are taken in turn, so that what else runs meets all; the least is printed."""


def compare_table(model: dict[str, Any], msprobe: str | None, scratch: Path) -> Iterator[str]:
    """Yield the lines of a table in Markdown.

    Args:
        model: settings of the model.
        msprobe: an interpreter in whose environment msprobe is; or None.
        scratch: directory for the runs.
    """
    yield "| compare of two steps | records | CPU s |"
    yield "|---|---|---|"
    ours = [scratch / f"compare-{side}" for side in ("baseline", "candidate")]
    for out in ours:
        _record(sys.executable, model, out, "ours", ["steps=1"])
    command = [str(Path(sys.executable).with_name("mindspeed-precision")), "compare", *map(str, ours)]
    records = sum(1 for line in next(ours[0].rglob("index.jsonl")).open("rb") if b'"kind":"record"' in line)
    commands = {f"ours, statistics | {records}": command}
    for level in ("L0", "L1", "mix") if msprobe else ():
        out = scratch / f"compare-msprobe-{level}"
        _record(msprobe, model, out, "msprobe", [level, "statistics", "statistics"])
        dump = next((out / "step1").rglob("dump.json"))
        command = [str(Path(msprobe).with_name("msprobe")), "compare", "-tp", str(dump), "-gp", str(dump)]
        command += ["-o", str(out / "compared")]
        _cpu(command)
        rows = sum(1 for _ in next((out / "compared").glob("*.csv")).open("rb")) - 1
        commands[f"msprobe, {level} statistics | {rows}"] = command
    taken = [{name: _cpu(command) for name, command in commands.items()} for _ in range(REPEATS)]
    for name in commands:
        yield f"| {name} | {min(seconds[name] for seconds in taken):.2f} |"


def _record(python: str, model: dict[str, Any], out: Path, tool: str, settings: Sequence[str]) -> None:
    command = [python, "-W", "ignore", str(VARIANT), "--model", json.dumps(model), "--out", str(out)]
    command += ["--steps", "1", "--tool", tool, "--", *settings]
    subprocess.run(command, capture_output=True, check=True, umask=0o027)


def _cpu(command: Sequence[str]) -> float:
    """Return the CPU seconds of a command."""
    environment = {**os.environ, "PATH": f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}"}
    # pip compiles what it installs, a checkout compiles once
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=False, umask=0o027, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
