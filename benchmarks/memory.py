"""Resident memory of a long run, recorded and bare: capture that stays on must not grow.

Run by ``make memory``. Each run is a process of its own, the one after the other: the same small GPT, bare,
recorded as by default, and with every element kept. Prints resident memory after some of the steps.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

BARE = "bare"
VARIANTS: dict[str, tuple[str, ...]] = {
    BARE: (),
    "statistics (default)": ("capture.level=statistics",),
    "tensor": ("capture.level=tensor",),
}
MIB = 2**20


def resident() -> int:
    """Return the resident memory of this process, in bytes (Linux)."""
    status = Path("/proc/self/status").read_text("ascii").splitlines()
    (line,) = [line for line in status if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024


def train(name: str, out: Path, steps: int, model: dict[str, object]) -> list[int]:
    """Train ``steps`` steps as one of ``VARIANTS``; return the resident memory after each, in bytes."""
    from mindspeed_precision.testing import cpu

    cpu.install()
    from mindspeed_precision.session import Session
    from mindspeed_precision.testing.trainer import CpuTrainer, TrainerSettings

    found = []
    with ExitStack() as stack:
        trainer = stack.enter_context(CpuTrainer(TrainerSettings(**model)))  # type: ignore[arg-type]
        session = None
        if name != BARE:
            settings = ["determinism.enabled=false", *VARIANTS[name]]
            session = stack.enter_context(
                Session(model=trainer.model, optimizer=trainer.optimizer, out=out, overrides=settings)
            )
            trainer.forward_step = session.forward_step(trainer.forward_step)
        for step in range(steps):
            result = trainer.train_one_step()
            if session is not None:
                session.step(loss=result.loss)
            if step % 20 == 19 and name == "tensor":  # a disk is not what is measured
                for file in out.rglob("step*.safetensors"):
                    file.unlink()
            found.append(resident())
    return found


def table(found: dict[str, list[int]], at: Sequence[int]) -> Iterator[str]:
    """Yield the lines of a table in Markdown: MiB after some steps, and growth per step beyond a quarter."""
    yield f"| | {' | '.join(f'step {step}' for step in at)} | KiB a step from step {at[0]} on |"
    yield "|---" * (len(at) + 2) + "|"
    for name, sizes in found.items():
        shown = " | ".join(f"{sizes[step - 1] / MIB:.1f} MiB" for step in at)
        growth = (sizes[at[-1] - 1] - sizes[at[0] - 1]) / (at[-1] - at[0]) / 1024
        yield f"| {name} | {shown} | {growth:.1f} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at", nargs="+", type=int, default=[20, 100, 200], help="steps to print, ascending")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--seq-length", type=int, default=32)
    parser.add_argument("--variant", choices=list(VARIANTS), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    model = {"layers": options.layers, "hidden": options.hidden, "seq_length": options.seq_length}
    if options.variant:
        sys.stdout.write(json.dumps(train(options.variant, options.out, options.at[-1], model)) + "\n")
        return
    found = {}
    with tempfile.TemporaryDirectory(prefix="memory-") as directory:
        for number, name in enumerate(VARIANTS):
            out = Path(directory) / str(number)
            command = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], "--variant", name]
            done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, check=False)
            if done.returncode:
                sys.stderr.write(done.stderr)
                sys.exit(done.returncode)
            found[name] = json.loads(done.stdout.splitlines()[-1])
            shutil.rmtree(out, ignore_errors=True)
    sys.stdout.write("\n".join(table(found, options.at)) + "\n")


if __name__ == "__main__":
    main()
