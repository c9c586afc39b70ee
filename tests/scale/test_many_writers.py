"""Ranks that write into one run directory at once touch nothing of each other, however many there are."""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.dump.writer import RankWriter, create_run
from mindspeed_precision.record.statistics import digest_number
from mindspeed_precision.records import Phase, RankCoordinates, RecordKey, Role, TensorRecord

RANKS, STEPS, RECORDS = 16, 20, 50
_TOUCHING = (
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.link",
    "os.listdir",
    "os.scandir",
    "os.truncate",
)


def record(seq: int, step: int, rank: int) -> TensorRecord:
    key = RecordKey(step=step, phase=Phase.OPTIMIZER, fqn=f"layer.{seq}", role=Role.HYPERPARAMETER)
    return TensorRecord(
        seq=seq, key=key, shape=(), dtype="float64", layout=None, digest=digest_number(rank + seq)
    )


def write(directory: Path, rank: int, world: int, steps: int, touched: list[tuple[str, str]]) -> None:
    """Write a rank, and note which paths below the run directory are touched."""
    watching = True

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event in _TOUCHING:
            paths = [str(one) for one in arguments if isinstance(one, str | os.PathLike)]
            touched.extend((event, path) for path in paths if path.startswith(str(directory)))

    sys.addaudithook(watch)  # cannot be taken away: it ends by itself
    try:
        writer = RankWriter(
            directory, coordinates=RankCoordinates(rank=rank, world_size=world), queue=1 << 20
        )
        writer.declare_parameters([])
        for step in range(steps):
            of_step = [record(step * RECORDS + n, step, rank) for n in range(RECORDS)]
            writer.write_step(step, of_step, {}, microbatches=1)
        writer.close(complete=True)
    finally:
        watching = False


def one_rank(directory: Path, rank: int, barrier: Barrier, failed: Any) -> None:
    touched: list[tuple[str, str]] = []
    barrier.wait(100)
    write(directory, rank, RANKS, STEPS, touched)
    own = str(directory / f"rank{rank:05d}")
    foreign = [(event, path) for event, path in touched if not path.startswith(own)]
    if foreign or not touched:
        failed.put((rank, foreign[:3], len(touched)))


def test_sixteen_processes_that_write_at_once_touch_their_own_directories_alone(tmp_path):
    run = tmp_path / "run"
    create_run(run, {"parallel": {"world_size": RANKS}})
    context = multiprocessing.get_context("forkserver")  # this process has threads
    context.set_forkserver_preload([RankWriter.__module__])
    barrier, failed = context.Barrier(RANKS), context.SimpleQueue()
    ranks = [(run, rank, barrier, failed) for rank in range(RANKS)]
    processes = [context.Process(target=one_rank, args=rank, daemon=True) for rank in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * RANKS
    assert failed.empty(), failed.get()
    found = load_run(run)
    assert sorted(found.ranks) == list(range(RANKS))
    for rank, records in found.ranks.items():
        assert records.complete
        assert [one.value for one in records.records] == [rank + n for n in range(STEPS * RECORDS)]


def started(run: Path, world: int) -> list[str]:
    """Return what a rank of a run touches to start, write a step and end, beside the ranks of that run."""
    create_run(run, {"parallel": {"world_size": world}})
    for rank in range(1, world):
        (run / f"rank{rank:05d}").mkdir()
    touched: list[tuple[str, str]] = []
    write(run, 0, world, 1, touched)
    return sorted(event for event, _ in touched)


def test_what_a_rank_touches_does_not_depend_on_how_many_there_are(tmp_path):
    alone, among_many = started(tmp_path / "one", 1), started(tmp_path / "many", 3000)
    assert alone == among_many
    assert "open" in alone
    assert not {"os.listdir", "os.scandir"} & set(among_many)
