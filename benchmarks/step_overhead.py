"""What capture costs: training steps with and without it, and with msprobe where that is installed.

Run by ``make bench``. Each variant is a process of its own (``variant.py``) that makes bare steps and then
steps with a tool, so that a ratio is of one process within seconds; rounds go through all variants, and
medians are printed. The sizes on disk are those of the files that a step left.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare_time import compare_table
from volume import volume_table

OURS: dict[str, tuple[str, ...]] = {
    "hooks only": ('capture.rules=[{fqn: "*", level: drop}]',),
    "fingerprint": ("capture.level=fingerprint",),
    "statistics (default)": (),
    "sketch": ("capture.level=sketch",),
    "tensor": ("capture.level=tensor",),
    "tensor, no queue": ("capture.level=tensor", "write_queue_mib=0"),
    "statistics, no queue": ("write_queue_mib=0",),
}
READING = "reading alone"
"""Each byte that is recorded is read, and nothing is made of it: what no recorder of them can be below."""
MSPROBE: dict[str, tuple[str, str, str]] = {
    "msprobe L0 statistics": ("L0", "statistics", "statistics"),
    "msprobe L0 md5": ("L0", "statistics", "md5"),
    "msprobe mix statistics": ("mix", "statistics", "statistics"),
    "msprobe mix md5": ("mix", "statistics", "md5"),
    "msprobe L0 tensor": ("L0", "tensor", "statistics"),
    "msprobe mix tensor": ("mix", "tensor", "statistics"),
}
OFF = "off"
ONCE = (
    "tensor",
    "tensor, no queue",
    "msprobe L0 md5",
    "msprobe mix md5",
    "msprobe L0 tensor",
    "msprobe mix tensor",
)
"""What takes long and costs so much that one process tells: not measured again in later rounds."""

VARIANTS = (OFF, READING, *OURS, *MSPROBE)
VARIANT = Path(__file__).with_name("variant.py")
MIB = 2**20
BYTES = 256
"""Entries of the vocabulary that the data use."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one variant cost in one round.

    Attributes:
        wall: seconds per step with the tool over seconds per bare step.
        cpu: the same of CPU seconds of all threads.
        bare: CPU seconds of a bare step.
        memory: peak of resident memory over that of bare steps.
        disk: bytes per step.
        files: files per step.
        records: per step; 0 where they are not counted.
        index: bytes of the index per step.
        parameters: of the model.
    """

    wall: float
    cpu: float
    bare: float
    memory: float
    disk: float = 0.0
    files: float = 0.0
    records: float = 0.0
    index: float = 0.0
    parameters: int = 0


def measure(name: str, options: argparse.Namespace, out: Path) -> Cost | str:
    """Return what a variant cost, or why it could not be measured."""
    tool = {OFF: "none", READING: "reading"}.get(name, "ours" if name in OURS else "msprobe")
    python = options.msprobe if tool == "msprobe" else sys.executable
    command = [python, "-W", "ignore", str(VARIANT), "--model", json.dumps(model_of(options))]
    command += ["--out", str(out), "--steps", str(options.steps), "--tool", tool]
    command += ["--", *(OURS.get(name) or MSPROBE.get(name) or ())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, umask=0o027)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return (done.stderr.strip().splitlines() or ["no output"])[-1]
    found = json.loads(lines[-1])
    cost: dict[str, Any] = {name: found["tool"][name] / found["bare"][name] for name in ("wall", "cpu")}
    cost.update(memory=found["tool"]["peak"] / found["bare"]["peak"], bare=found["bare"]["cpu"])
    return Cost(**cost, parameters=found["parameters"], **_sizes(out, tool))


def _sizes(out: Path, tool: str) -> dict[str, float]:
    """Return what one step left on the disk: the third of ours and of msprobe's."""
    if tool == "none":
        return {}
    if tool == "msprobe":
        files = [path for path in (out / "step2").rglob("*") if path.is_file()]
        return {"disk": sum(path.stat().st_size for path in files), "files": len(files)}
    (index,) = out.rglob("index.jsonl")
    lines = [line for line in index.read_bytes().splitlines() if line.startswith(b'{"kind":"record"')]
    lines = [line for line in lines if b'"step":2,' in line[:64]]
    payloads = [path for path in out.rglob("step000002*") if path.is_file()]
    text = sum(len(line) + 1 for line in lines)
    disk = text + sum(path.stat().st_size for path in payloads)
    return {"disk": disk, "files": len(payloads), "records": len(lines), "index": text}


def model_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the model that is trained."""
    names = ("layers", "hidden", "seq_length", "micro_batch_size", "microbatches", "dtype")
    chosen = {name: getattr(options, name) for name in names}
    return {"heads": 8, "untie": True, "padding": options.vocabulary - BYTES, **chosen}


def table(rounds: dict[str, list[Cost | str]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield "| | CPU | wall | memory | MiB/step | files/step | records | B/record |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, found in rounds.items():
        costs = [cost for cost in found if isinstance(cost, Cost)]
        if not costs:
            yield f"| {name} | not measured: {found[-1] if found else 'no round'} | | | | | | |"
            continue
        cpu, wall, memory = (
            statistics.median(getattr(cost, kind) for cost in costs) for kind in ("cpu", "wall", "memory")
        )
        last = costs[-1]
        disk = f"{last.disk / MIB:.2f} | {last.files:.0f}" if last.disk else "|"
        records = f"{last.records:.0f} | {last.index / last.records:.0f}" if last.records else "|"
        yield f"| {name} | {cpu:.3f} | {wall:.3f} | {memory:.2f} | {disk} | {records} |"


def excess_line(rounds: dict[str, list[Cost | str]]) -> str:
    """Return how much smaller our excess over the bare step is than msprobe's at mix statistics."""

    def excess(name: str) -> float | None:
        costs = [cost.cpu for cost in rounds.get(name, []) if isinstance(cost, Cost)]
        return statistics.median(costs) - 1 if costs else None

    ours, theirs = excess("statistics (default)"), excess("msprobe mix statistics")
    if ours is None or theirs is None:
        return "the excess of msprobe was not measured"
    return f"CPU excess: {ours:.3f} against {theirs:.3f} of msprobe mix statistics, {theirs / ours:.1f} times"


def msprobe_python(text: str) -> tuple[str | None, str]:
    """Return the interpreter in which msprobe is, or None, and its version, or why there is none."""
    if not text or not Path(text).exists():
        return None, f"no environment at {text or '(none was given)'}"
    look = "import importlib.metadata as m, torch; print(m.version('mindstudio-probe'), torch.__version__)"
    done = subprocess.run([text, "-W", "ignore", "-c", look], capture_output=True, text=True, check=False)
    if done.returncode:
        return None, (done.stderr.strip().splitlines() or ["it does not run"])[-1]
    return text, done.stdout.split()[0]


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each kind in a process")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--only", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--msprobe", default=os.environ.get("MSP_MSPROBE_PYTHON", ""), help="its interpreter")
    parser.add_argument("--no-compare", action="store_true", help="do not time compare")
    parser.add_argument("--profile", choices=list(OURS), help="profile a variant instead")
    parser.add_argument("--volume", action="store_true", help="print the bytes that a step digests instead")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options = arguments()
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        scratch = Path(directory)
        if options.profile or options.volume:
            _look_closer(options, scratch)
            return
        options.msprobe, version = msprobe_python(options.msprobe)
        sys.stdout.write(f"msprobe {version}\n" if options.msprobe else f"msprobe is left out: {version}\n")
        chosen = [name for name in options.only if options.msprobe or name not in MSPROBE]
        rounds: dict[str, list[Cost | str]] = {name: [] for name in chosen}
        for number in range(options.rounds):
            for name in chosen:
                if number and name in ONCE:
                    continue
                out = scratch / f"{number}-{name.replace(' ', '-')}"
                rounds[name].append(measure(name, options, out))
                shutil.rmtree(out, ignore_errors=True)
        sys.stdout.write("\n".join([_title(options, rounds), *table(rounds), "", excess_line(rounds), ""]))
        if not options.no_compare:
            sys.stdout.write(
                "\n" + "\n".join(compare_table(model_of(options), options.msprobe, scratch)) + "\n"
            )


def _title(options: argparse.Namespace, rounds: dict[str, list[Cost | str]]) -> str:
    costs = [cost for found in rounds.values() for cost in found if isinstance(cost, Cost)]
    millions = max((cost.parameters for cost in costs), default=0) / 1e6
    bare = statistics.median(cost.bare for cost in costs) if costs else 0.0
    return (
        f"GPT of megatron-core: {options.layers} layers, hidden {options.hidden}, vocabulary "
        f"{options.vocabulary}, {millions:.1f} M parameters, {options.microbatches} x "
        f"{options.micro_batch_size} x {options.seq_length} tokens, {options.dtype}, one thread; a bare step "
        f"takes {bare:.2f} CPU s. Ratios to the bare step of the same process, medians of {options.rounds} "
        f"processes of {options.steps} steps; of one process: {', '.join(ONCE)}.\n"
    )


def _look_closer(options: argparse.Namespace, scratch: Path) -> None:
    name = options.profile or "statistics (default)"
    command = [sys.executable, "-W", "ignore", str(VARIANT), "--model", json.dumps(model_of(options))]
    command += ["--out", str(scratch / "run"), "--steps", str(options.steps), "--tool", "ours"]
    command += ["--profile"] if options.profile else []
    done = subprocess.run([*command, "--", *OURS[name]], capture_output=True, text=True, check=True)
    sys.stdout.write(done.stdout if options.profile else "\n".join(volume_table(scratch / "run")) + "\n")


if __name__ == "__main__":
    main()
