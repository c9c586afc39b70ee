"""What capture costs: training steps with and without a Session, taken in turn in one process.

Run by ``make bench``. Every round runs each variant once; a ratio is taken within its round, and the median
of the rounds is printed, so that a machine that slows down between rounds does not show.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import io
import pstats
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mindspeed_precision.testing import cpu

cpu.install()  # before Megatron is imported

import torch  # noqa: E402

from mindspeed_precision.session import Session  # noqa: E402
from mindspeed_precision.testing.trainer import CpuTrainer, TrainerSettings  # noqa: E402

VARIANTS: dict[str, tuple[str, ...]] = {
    "hooks only": ('capture.rules=[{fqn: "*", level: drop}]',),
    "fingerprint": ("capture.level=fingerprint",),
    "statistics": ("capture.level=statistics",),
    "sketch": ("capture.level=sketch",),
    "tensor": ("capture.level=tensor",),
    "tensor, no queue": ("capture.level=tensor", "write_queue_mib=0"),
    "statistics, no queue": ("capture.level=statistics", "write_queue_mib=0"),
}
BARE = "bare step"
WARM_UP = 1


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one variant cost in one round.

    Attributes:
        wall: seconds per step, median.
        cpu: seconds of all threads per step, mean.
        peak: largest resident memory, bytes.
        records: per step; 0 without a session.
        index: bytes of ``index.jsonl`` per step.
        disk: bytes of the run per step.
    """

    wall: float
    cpu: float
    peak: int
    records: float = 0.0
    index: float = 0.0
    disk: float = 0.0


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


def _time(step: Callable[[], object], steps: int) -> Cost:
    for _ in range(WARM_UP):
        step()
    gc.collect()
    _reset_peak()
    walls, cpu_start = [], time.process_time()
    for _ in range(steps):
        start = time.perf_counter()
        step()
        walls.append(time.perf_counter() - start)
    cpu_seconds = (time.process_time() - cpu_start) / steps
    return Cost(wall=statistics.median(walls), cpu=cpu_seconds, peak=_peak())


@contextmanager
def _recorded(trainer: CpuTrainer, overrides: tuple[str, ...], out: Path) -> Iterator[Callable[[], object]]:
    """Yield a recorded step. Nothing is pinned: determinism has its own price, with capture or without."""
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


def _measure(trainer: CpuTrainer, name: str, steps: int, scratch: Path) -> Cost:
    if name == BARE:
        return _time(trainer.train_one_step, steps)
    out = scratch / name.replace(" ", "-")
    try:
        with _recorded(trainer, VARIANTS[name], out) as step:
            cost = _time(step, steps)
        return _with_sizes(cost, out, WARM_UP + steps)
    finally:
        shutil.rmtree(out, ignore_errors=True)


def _with_sizes(cost: Cost, out: Path, steps: int) -> Cost:
    """Add what lies on the disk; the initial parameters, recorded once, are left out."""
    files = {
        path: path.stat().st_size for path in out.rglob("*") if path.is_file() and "init" not in path.name
    }
    (index,) = out.rglob("index.jsonl")
    lines = [line for line in index.read_bytes().splitlines() if line.startswith(b'{"kind":"record"')]
    lines = [line for line in lines if b'"phase":"init"' not in line]
    payload = sum(size for path, size in files.items() if path.suffix == ".safetensors")
    text = sum(map(len, lines))
    return Cost(
        wall=cost.wall,
        cpu=cost.cpu,
        peak=cost.peak,
        records=len(lines) / steps,
        index=text / steps,
        disk=(text + payload) / steps,
    )


def _table(rounds: dict[str, list[Cost]]) -> Iterator[str]:
    bare = rounds[BARE]
    yield (
        f"{'':12} {'CPU ratio':>9} {'wall ratio':>10} {'CPU s':>7} {'wall s':>7} {'peak MiB':>9} "
        f"{'records':>8} {'B/record':>8} {'MiB/step':>8}"
    )
    for name, costs in rounds.items():
        cpu_ratio = statistics.median(c.cpu / b.cpu for c, b in zip(costs, bare, strict=True))
        wall_ratio = statistics.median(c.wall / b.wall for c, b in zip(costs, bare, strict=True))
        last = costs[-1]
        yield (
            f"{name:12} {cpu_ratio:9.3f} {wall_ratio:10.3f} {statistics.median(c.cpu for c in costs):7.3f} "
            f"{statistics.median(c.wall for c in costs):7.3f} {max(c.peak for c in costs) / 2**20:9.0f} "
            f"{last.records:8.0f} {last.index / last.records if last.records else 0:8.0f} "
            f"{last.disk / 2**20:8.2f}"
        )


def _profile(trainer: CpuTrainer, name: str, steps: int, scratch: Path, rows: int) -> str:
    """Return where the time of a recorded step goes, by function."""
    out, profile = scratch / "profile", cProfile.Profile()
    with _recorded(trainer, VARIANTS[name], out) as step:
        step()
        profile.enable()
        for _ in range(steps):
            step()
        profile.disable()
    shutil.rmtree(out)
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(rows)
    return text.getvalue()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each variant in a round")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--profile", choices=list(VARIANTS), help="profile this variant instead")
    options = parser.parse_args()
    settings = TrainerSettings(
        layers=options.layers,
        hidden=options.hidden,
        heads=8,
        seq_length=options.seq_length,
        micro_batch_size=options.micro_batch_size,
        microbatches=options.microbatches,
        dtype=options.dtype,
    )
    with tempfile.TemporaryDirectory(prefix="bench-") as directory, CpuTrainer(settings) as trainer:
        scratch = Path(directory)
        trainer.train(2)
        if options.profile:
            sys.stdout.write(_profile(trainer, options.profile, options.steps, scratch, rows=45))
            return
        parameters = sum(p.numel() for chunk in trainer.model for p in chunk.parameters()) / 1e6
        sys.stdout.write(
            f"GPT of megatron-core: {options.layers} layers, hidden {options.hidden}, {parameters:.1f} M "
            f"parameters, {options.microbatches} x {options.micro_batch_size} x {options.seq_length} tokens, "
            f"{options.dtype}, {torch.get_num_threads()} thread; medians of {options.rounds} rounds x "
            f"{options.steps} steps\n"
        )
        rounds: dict[str, list[Cost]] = defaultdict(list)
        for _ in range(options.rounds):
            for name in (BARE, *options.only):
                rounds[name].append(_measure(trainer, name, options.steps, scratch))
        sys.stdout.write("\n".join(_table(rounds)) + "\n")


if __name__ == "__main__":
    main()
