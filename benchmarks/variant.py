"""One variant of ``step_overhead.py`` in a process of its own: bare steps, then steps with a tool.

Prints one line of JSON. It runs in this package's environment, or in one where msprobe is installed: what a
tool patches, imports and leaves behind reaches no other measurement, and peaks of memory are its own.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import io
import json
import pstats
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

Step = Callable[[], object]
WARM_UP = 2
"""Steps that are not counted: the first allocates the optimizer's state and, of a tool, what it keeps."""


def msprobe_debugger(out: Path, level: str, task: str, summary: str) -> Any:
    """Return msprobe's debugger; made before the model and its modules are, as its documentation asks."""
    from msprobe.pytorch import PrecisionDebugger

    kept: dict[str, Any] = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": summary}
    plain = {"task": task, "dump_path": str(out), "rank": [], "step": [], "level": level, task: kept}
    out.mkdir(mode=0o750, parents=True)
    config = out / "config.json"
    config.write_text(json.dumps(plain), encoding="utf-8")
    return PrecisionDebugger(config_path=str(config))


@contextmanager
def msprobe_steps(trainer: Any, debugger: Any) -> Iterator[Step]:
    """Yield a step under msprobe: the optimizer inside, as in its documentation's template."""

    def step() -> None:
        debugger.start(model=trainer.model)
        trainer.train_one_step()
        debugger.stop()
        debugger.step()

    yield step


@contextmanager
def our_steps(trainer: Any, out: Path, overrides: list[str]) -> Iterator[Step]:
    """Yield a recorded step. Nothing is pinned: determinism has its own price, with capture or without."""
    from mindspeed_precision.session import Session

    plain = trainer.forward_step
    settings = ["determinism.enabled=false", *overrides]
    with Session(model=trainer.model, optimizer=trainer.optimizer, out=out, overrides=settings) as session:
        trainer.forward_step = session.forward_step(plain)

        def step() -> None:
            session.step(loss=trainer.train_one_step().loss)

        try:
            yield step
        finally:
            trainer.forward_step = plain


def _without_digests(wanted: bool) -> AbstractContextManager[None]:
    """Read what is recorded instead of digesting it: what a recorder costs at least."""
    if not wanted:
        return nullcontext()
    from plain_read import reading_only

    return reading_only()


def _reset_peak() -> None:
    """Let the kernel forget the peak of resident memory (Linux; elsewhere peaks only grow)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak() -> int:
    """Return the peak of resident memory, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = [line for line in status.read_text("ascii").splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def timed(step: Step, steps: int) -> dict[str, float]:
    """Return seconds and CPU seconds (of all threads) of a step, medians, and the peak of resident memory."""
    for _ in range(WARM_UP):
        step()
    gc.collect()
    _reset_peak()
    walls, cpus = [], []
    for _ in range(steps):
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return {"wall": statistics.median(walls), "cpu": statistics.median(cpus), "peak": _peak()}


def _profile(step: Step, steps: int) -> str:
    """Return where the time of recorded steps goes, by function."""
    profile = cProfile.Profile()
    step()
    profile.enable()
    for _ in range(steps):
        step()
    profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(45)
    return text.getvalue()


def main() -> None:
    """Measure one variant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="JSON: TrainerSettings")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--tool", choices=["none", "ours", "reading", "msprobe"], required=True)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("settings", nargs="*", help="ours: overrides; msprobe: level, task, summary")
    options = parser.parse_args()
    from mindspeed_precision.testing import cpu

    cpu.install()  # before Megatron is imported, which msprobe does
    debugger = msprobe_debugger(options.out, *options.settings) if options.tool == "msprobe" else None
    from mindspeed_precision.testing.trainer import CpuTrainer, TrainerSettings

    with CpuTrainer(TrainerSettings(**json.loads(options.model))) as trainer:
        found: dict[str, object] = {
            "bare": timed(trainer.train_one_step, options.steps),
            "parameters": sum(p.numel() for chunk in trainer.model for p in chunk.parameters()),
        }
        if options.tool == "none":
            found["tool"] = timed(trainer.train_one_step, options.steps)
        else:
            around = (
                our_steps(trainer, options.out, options.settings)
                if debugger is None
                else msprobe_steps(trainer, debugger)
            )
            with around as step, _without_digests(options.tool == "reading"):
                if options.profile:
                    sys.stdout.write(_profile(step, options.steps))
                    return
                found["tool"] = timed(step, options.steps)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
