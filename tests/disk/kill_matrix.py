"""Kill a training that records, at random moments, again and again: what was whole must be readable.

    python tests/disk/kill_matrix.py 300 --seed 7

Each victim is a fork of this process, which has loaded the framework: a kill costs a second, not ten. With a
queue of 0 a step is on the disk when ``session.step()`` returns, and the victim says so through a pipe: such
a step must be there afterwards. With a queue the steps must be whole and without a hole, however many.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from plain_training import train

from mindspeed_precision.dump.reader import RankRecords, load_run
from mindspeed_precision.errors import DumpError
from mindspeed_precision.records import INIT_STEP

STEPS = 40
WIDTH = 256
QUIET = ("capture.live_warnings=false",)
LONGEST = 0.6
"""Seconds after the first step (or, for one in five, after the fork) within which a victim dies."""


def describe(rank: RankRecords) -> list[tuple[object, ...]]:
    """Return what each record says, and its elements, which are read."""
    return [
        (
            record.key,
            record.digest.fingerprint,
            None if record.payload is None else rank.payload(record).bits.tobytes(),
        )
        for record in rank.records
    ]


def kill_one(out: Path, queue: int, draw: random.Random) -> int:
    """Start a training, kill it, return how many steps it had said to be on the disk."""
    reading, writing = os.pipe()
    victim = os.fork()
    if not victim:
        os.close(reading)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        train(
            out,
            steps=STEPS,
            width=WIDTH,
            overrides=[f"write_queue_mib={queue}", *QUIET],
            after=lambda step: os.write(writing, b".") and None,
        )
        os._exit(0)
    os.close(writing)
    if draw.random() < 0.8:
        select.select([reading], [], [], 60)
        time.sleep(draw.uniform(0, LONGEST))
    else:
        time.sleep(draw.uniform(0, LONGEST / 4))
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)
    with os.fdopen(reading, "rb") as said:
        return len(said.read())


def judge(out: Path, said: int, queue: int, reference: list[tuple[object, ...]]) -> str:
    """Return in a word what is left of a run.

    Raises:
        DumpError: something that was whole is not readable.
        AssertionError: it is something else.
    """
    try:
        run = load_run(out)
    except DumpError as error:
        early = any(word in error.what for word in ("no such run directory", "not a run", "no rank"))
        if (said and not queue) or not early:
            raise
        return "before its first line"
    rank = run.ranks[0]
    found = describe(rank)
    steps = [step for step in rank.steps if step != INIT_STEP]
    assert steps == list(range(len(steps))), steps
    assert found == reference[: len(found)], "another content"
    assert queue or len(steps) >= said, f"{len(steps)} steps, {said} were on the disk"
    if rank.complete:
        return "after its end"
    named = {record.payload for record in rank.records}
    begun = {path.name for path in rank.directory.glob("step*")} - named
    torn = any("not whole" in note for note in rank.notes)
    return "while a step was written" if begun or torn else "between two writes"


def main() -> int:
    """Kill, read, count; print the table. Status 1 where a run was not readable."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kills", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    base = Path(tempfile.mkdtemp(prefix="kill-matrix-"))
    failed, found = 0, Counter[tuple[int, str]]()
    try:
        train(base / "reference", steps=STEPS, width=WIDTH, overrides=QUIET)
        reference = describe(load_run(base / "reference").ranks[0])
        for number in range(arguments.kills):
            queue = 64 * (number % 2)
            out = base / f"run{number}"
            said = kill_one(out, queue, draw)
            try:
                found[queue, judge(out, said, queue, reference)] += 1
            except Exception as error:  # noqa: BLE001  counted, and named
                failed += 1
                sys.stdout.write(f"kill {number} (queue {queue} MiB): {type(error).__name__}: {error}\n")
            shutil.rmtree(out, ignore_errors=True)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    for (queue, where), count in sorted(found.items()):
        sys.stdout.write(f"{count:5} killed {where}, queue {queue} MiB: all whole steps read\n")
    sys.stdout.write(f"{arguments.kills} kills, seed {arguments.seed}: {failed} runs not readable\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
