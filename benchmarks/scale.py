"""What it costs to compare, or to check, runs of thousands of ranks: seconds, processor seconds and memory.

Two synthetic runs are written, one with a fault in one rank of one data-parallel replica, and compared by the
command, as a user would. With ``--check`` the first of them alone is written, and checked. ``--fit`` varies
ranks, steps and records one at a time and fits a line to each; ``--figure`` draws it::

    python benchmarks/scale.py --scratch /tmp/scale
    python benchmarks/scale.py --scratch /tmp/scale --fit --figure docs/figures/scale.svg
    python benchmarks/scale.py --scratch /tmp/scale --dp 8 --pp 4 --tp 2 --distributed-optimizer
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scale_figure import MEASURED, VARIED, draw, line

from mindspeed_precision.testing.scale_runs import Fault, ScaleRun, records_per_step, write_scale_run

WHOLE = ScaleRun(tp=8, pp=8, dp=64, layers=6, microbatches=4, steps=3)
"""4096 ranks, 3 steps, 2086 records a step."""

MIB = 1 << 20
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one comparison cost.

    Attributes:
        ranks: of each run.
        steps: of each.
        records: of a rank in a step, on the average.
        gigabytes: of both runs' indices.
        seconds: from the start of the command to its end.
        cpu_seconds: of all its processes.
        memory_mib: most that all its processes held together, shared pages counted in each.
        status: exit status: 1 for runs that differ.
        told: what the command said of what it read.
    """

    ranks: int
    steps: int
    records: float
    gigabytes: float
    seconds: float
    cpu_seconds: float
    memory_mib: int
    status: int
    told: str

    def row(self) -> str:
        """Return it as a row of a table in Markdown."""
        return (
            f"| {self.ranks} | {self.steps} | {self.records:.0f} | {self.gigabytes:.2f} | {self.seconds:.0f} "
            f"| {self.cpu_seconds:.0f} | {self.memory_mib} |"
        )


HEAD = (
    "| ranks | steps | records a step and rank | GB read | s | CPU s | peak MiB |\n"
    "|---|---|---|---|---|---|---|"
)


def measure(run: ScaleRun, scratch: Path, options: Sequence[str], *, check: bool = False) -> Cost:
    """Write two runs, compare them, and remove them; or one, and check it."""
    baseline, candidate = scratch / "baseline", scratch / "candidate"
    fault = Fault(step=run.steps - 2, dp=run.dp - 1, tp=run.tp - 1, layer=run.layers * run.pp // 2)
    try:
        write_scale_run(baseline, run)
        words = ["check", str(baseline), *options]
        if not check:
            write_scale_run(candidate, replace(run, fault=fault))
            out = str(scratch / "compared")
            words = ["compare", str(baseline), str(candidate), "--out", out, "--no-replay", *options]
        size = sum(file.stat().st_size for file in scratch.rglob("index.jsonl"))
        seconds, cpu, memory, status, told = _timed(words)
    finally:
        for directory in (baseline, candidate, scratch / "compared"):
            shutil.rmtree(directory, ignore_errors=True)
    return Cost(
        ranks=run.world,
        steps=run.steps,
        records=records_per_step(run),
        gigabytes=size / 1e9,
        seconds=seconds,
        cpu_seconds=cpu,
        memory_mib=memory // MIB,
        status=status,
        told=told,
    )


def _timed(words: Sequence[str]) -> tuple[float, float, int, int, str]:
    command = [sys.executable, "-m", "mindspeed_precision", *words]
    before, began = os.times(), time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        watch = _Watch(process.pid)
        shown, told = process.communicate()
        watch.stop()
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return time.monotonic() - began, cpu, watch.most, process.returncode, told.strip() or _notes(shown)


def _notes(shown: str) -> str:
    """Return what a command told in its notes."""
    return " ".join(shown.partition("  notes ")[2].split())


class _Watch(threading.Thread):
    """Looks at the memory of a process and of all that it started, until it is stopped."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.most = 0
        self._pid, self._end = pid, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._end.wait(0.05):
            self.most = max(self.most, sum(map(_resident, _family(self._pid))))

    def stop(self) -> None:
        self._end.set()
        self.join()


def _family(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from _family(int(child))


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def variations(run: ScaleRun) -> dict[str, list[ScaleRun]]:
    """Return runs in which ranks, steps and records grow, one at a time."""
    shares = (1, 2, 4, 8)
    return {
        "ranks": [replace(run, dp=run.dp * share) for share in shares],
        "steps": [replace(run, steps=run.steps * share) for share in shares],
        "records": [replace(run, microbatches=run.microbatches * share) for share in shares],
    }


def fitted(costs: Sequence[Cost], runs: int = 2) -> tuple[float, float]:
    """Return CPU seconds that do not grow, and microseconds for each record of so many runs."""
    records = [runs * cost.ranks * cost.steps * cost.records for cost in costs]
    slope, constant = np.polyfit(records, [cost.cpu_seconds for cost in costs], 1)
    return float(constant), float(slope) * 1e6


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True, help="an empty directory; 23 GB at full size")
    for name in ("tp", "pp", "dp", "layers", "microbatches", "steps"):
        parser.add_argument(f"--{name}", type=int, default=getattr(WHOLE, name))
    about = "each data-parallel rank has ranges of the parameters, as under Megatron's"
    parser.add_argument("--distributed-optimizer", action="store_true", help=about)
    parser.add_argument("--memory", default="2GiB", help="as compare has it")
    parser.add_argument("--jobs", help="as compare has it")
    parser.add_argument("--check", action="store_true", help="check one run, in place of comparing two")
    parser.add_argument("--fit", action="store_true", help="vary ranks, steps and records by 1, 2, 4 and 8")
    parser.add_argument("--figure", type=Path, help="draw the fit into an SVG file")
    parser.add_argument("--json", type=Path, help="write the numbers, too")
    chosen = parser.parse_args(words)
    sizes = {name: getattr(chosen, name) for name in ("tp", "pp", "dp", "layers", "microbatches", "steps")}
    run = ScaleRun(**sizes, distributed=chosen.distributed_optimizer)
    options = ["--memory", chosen.memory, *(["--jobs", chosen.jobs] if chosen.jobs else [])]
    chosen.scratch.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Cost]] = {}
    _say(HEAD)
    for name, runs in variations(run).items() if chosen.fit else [("one", [run])]:
        for one in runs:
            found.setdefault(name, []).append(measure(one, chosen.scratch, options, check=chosen.check))
            _say(found[name][-1].row())
    _say(next(iter(found.values()))[0].told)
    if chosen.fit:
        for name, costs in found.items():
            constant, slope = fitted(costs, 1 if chosen.check else 2)
            what = "each record" if chosen.check else "each record of both runs"
            _say(f"{name}: {constant:.1f} CPU s + {slope:.2f} µs for {what}")
            for field, (_, unit) in MEASURED.items():
                fit = line(*([float(getattr(cost, which)) for cost in costs] for which in (name, field)))
                _say(f"  {fit.describe(unit, VARIED[name])}, {fit.off:.1f} {unit} off at most")
    if chosen.json is not None:
        plain: dict[str, Any] = {name: [asdict(cost) for cost in costs] for name, costs in found.items()}
        chosen.json.write_text(json.dumps(plain, indent=1) + "\n")
    if chosen.figure is not None:
        draw(found, chosen.figure)
    return 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
