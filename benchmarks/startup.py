"""What starting to record costs rank 0, by the number of ranks: collectives, files and processor time.

    python benchmarks/startup.py --ranks 8 512 4096

One process trains on ``megatron.core`` with torch's fake process group, whose collectives do nothing. Rank 0
does what every rank does, and makes the run directory besides. A second start goes on in the same run
(``restart=continue``), which has a directory for every rank by then.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_precision.session import Session
from mindspeed_precision.testing import cpu
from mindspeed_precision.testing.recorded import UNPINNED

_TOUCHING = ("open", "os.mkdir", "os.rename", "os.remove", "os.link", "os.listdir", "os.scandir")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one phase took.

    Attributes:
        collectives: operations of process groups, by name.
        files: what was done with paths in the run directory, by kind; ``stat`` too.
        seconds: of the processor.
    """

    collectives: dict[str, int]
    files: dict[str, int]
    seconds: float


class _Counting(TorchDispatchMode):
    """Counts the operations of process groups."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.found[function.__name__] += 1
        return function(*args, **(kwargs or {}))


class Files:
    """Counts what is done with paths below a directory; its audit hook cannot be taken away."""

    def __init__(self) -> None:
        self.below = ""
        self.found: Counter[str] = Counter()
        sys.addaudithook(self._event)

    @contextmanager
    def watching(self, directory: Path) -> Iterator[None]:
        """Count from here on, anew."""
        self.below, self.found = str(directory), Counter()
        stat = os.stat

        def counted(path: Any, *args: Any, **kwargs: Any) -> Any:
            self._note("stat", path)
            return stat(path, *args, **kwargs)

        with mock.patch("os.stat", counted):
            yield
        self.below = ""

    def _event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.below and event in _TOUCHING:
            self._note(event, arguments[0])

    def _note(self, kind: str, path: Any) -> None:
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self.below):
            self.found[kind] += 1


def cost(files: Files, directory: Path, work: Callable[[], Any]) -> Cost:
    """Do ``work`` and say what it took."""
    with files.watching(directory):
        began = time.process_time()
        with _Counting() as counting:
            work()
        seconds = time.process_time() - began
    return Cost(collectives=dict(counting.found), files=dict(files.found), seconds=seconds)


@contextmanager
def world(ranks: int) -> Iterator[None]:
    """Be rank 0 of ``ranks`` whose process groups do nothing."""
    new_group = dist.new_group

    def fake(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **kwargs | {"backend": "fake"})

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with mock.patch("torch.distributed.new_group", fake):
            yield
    finally:
        dist.destroy_process_group()


def recorded_step(trainer: Any, session: Session) -> None:
    """Make a step, and end its record."""
    trainer.train_one_step()
    session.step()


def measured(ranks: int, files: Files, run: Path) -> dict[str, Cost]:
    """Return what each phase took in a run of ``ranks``; ``bare`` is a step without us."""
    from mindspeed_precision.testing.trainer import CpuTrainer, TrainerSettings

    costs = {}
    with world(ranks), ExitStack() as stack:
        trainer = stack.enter_context(CpuTrainer(TrainerSettings()))
        trainer.train_one_step()
        costs["bare"] = cost(files, run, trainer.train_one_step)
        for name, overrides in (("start", ()), ("restart", ("restart=continue",))):
            session = Session(
                model=trainer.model, optimizer=trainer.optimizer, out=run, overrides=[*UNPINNED, *overrides]
            )
            costs[name] = cost(files, run, session.__enter__)
            for step in ("first step", "later step"):
                costs[f"{name}, {step}"] = cost(files, run, partial(recorded_step, trainer, session))
            session.__exit__(None, None, None)
            for rank in range(1, ranks):
                (run / f"rank{rank:05d}").mkdir(exist_ok=True)
    return costs


def main() -> None:
    """Measure each number of ranks, and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 512, 4096], help="sizes of the world")
    parser.add_argument("--json", action="store_true", help="print every count")
    options = parser.parse_args()
    cpu.install(except_pieces=["gloo_backend"])
    files = Files()
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        measured(options.ranks[0], files, Path(scratch) / "warm")  # what is imported and compiled once
        for ranks in options.ranks:
            found[ranks] = measured(ranks, files, Path(scratch) / str(ranks))
    sys.stdout.write((told(found) if options.json else table(found)) + "\n")


def told(found: dict[int, dict[str, Cost]]) -> str:
    """Return every count as JSON, by the number of ranks and by phase."""
    plain = {ranks: {name: asdict(one) for name, one in costs.items()} for ranks, costs in found.items()}
    return json.dumps(plain)


def table(found: dict[int, dict[str, Cost]]) -> str:
    """Return the sums as a table."""
    lines = ["| ranks | | collectives | file calls | CPU s |", "|---|---|---|---|---|"]
    for ranks, costs in found.items():
        for name, one in costs.items():
            calls = ", ".join(f"{number} {kind}" for kind, number in sorted(one.files.items())) or "none"
            collectives = sum(one.collectives.values())
            lines.append(f"| {ranks} | {name} | {collectives} | {calls} | {one.seconds:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
