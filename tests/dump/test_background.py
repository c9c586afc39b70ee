"""The thread that writes: nothing dropped, bounded memory, errors where the training sees them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump.background import Background
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.dump.writer import RankWriter, create_run
from mindspeed_precision.errors import DumpError
from mindspeed_precision.records import Digest, Phase, RankCoordinates, RecordKey, Role, TensorRecord

PATIENCE = 10.0


def record(seq, step):
    key = RecordKey(step=step, microbatch=0, phase=Phase.FPROP, fqn="layer", role=Role.OUTPUT)
    return TensorRecord(
        seq=seq, key=key, shape=(4,), dtype="uint8", layout=None, digest=Digest(fingerprint=1, unordered=1)
    )


def write(writer, step):
    payload = {step: HostTensor(bits=np.full(4, step, np.uint8), dtype="uint8")}
    writer.write_step(step, [record(step, step)], payload, microbatches=1)


@pytest.fixture
def writer(tmp_path):
    create_run(tmp_path / "run", {"parallel": {"world_size": 1}})
    return RankWriter(tmp_path / "run", coordinates=RankCoordinates(), queue=1 << 20)


@pytest.fixture
def gate(writer):
    """Hold the disk up until it is told to go on."""
    gate = threading.Event()
    writer._jobs.put(lambda: gate.wait(PATIENCE), 1)
    yield gate
    gate.set()


def test_jobs_are_done_in_order_and_none_is_dropped():
    background, done = Background(limit=100), []
    for number in range(1000):
        background.put(lambda number=number: done.append(number), 7)
    background.finish()
    assert done == list(range(1000))


@pytest.mark.parametrize(("limit", "at_once"), [(100, 3), (30, 1), (10, 1)])
def test_what_waits_never_exceeds_the_limit_and_the_training_waits_instead(limit, at_once):
    background, release, held, most = Background(limit), threading.Semaphore(0), [0], [0]

    def job():
        release.acquire(timeout=PATIENCE)
        held[0] -= 30

    def train():
        for _ in range(10):
            background.put(job, 30)
            held[0] += 30
            most[0] = max(most[0], held[0])

    training = threading.Thread(target=train)
    training.start()
    deadline = time.monotonic() + PATIENCE
    while held[0] < 30 * at_once and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    assert held[0] == 30 * at_once  # and no more: the eleven others wait for the disk
    assert training.is_alive()
    for _ in range(10):
        release.release()
        time.sleep(0.01)
    training.join(PATIENCE)
    background.finish()
    assert not training.is_alive()
    assert held == [0]
    assert most == [30 * at_once]


def test_no_thread_is_left_and_nothing_is_kept_when_all_is_written():
    background = Background(limit=100)
    background.put(lambda: None, 50)
    background.finish()
    assert background._held == 0
    deadline = time.monotonic() + PATIENCE
    while any(thread.name == "precision-writer" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_an_error_is_raised_once_where_the_training_sees_it_and_nothing_follows():
    background, done = Background(limit=100), []

    def fail():
        raise DumpError("no space")

    background.put(fail, 1)
    background.finish()
    with pytest.raises(DumpError, match="no space"):
        background.raise_failure()
    background.put(lambda: done.append(1), 1)
    background.finish()
    background.raise_failure()
    assert done == []
    assert background._held == 0


def test_a_step_returns_before_it_is_on_the_disk_and_closing_waits_for_all(tmp_path, writer, gate):
    for step in range(3):
        write(writer, step)
    assert load_run(tmp_path / "run").ranks[0].steps == ()
    threading.Timer(0.05, gate.set).start()
    writer.close(complete=True)
    rank = load_run(tmp_path / "run").ranks[0]
    assert rank.steps == (0, 1, 2)
    assert rank.complete
    assert [int(rank.payload(record).bits[0]) for record in rank.records] == [0, 1, 2]


def test_a_training_that_failed_keeps_the_steps_that_had_ended(tmp_path, writer, gate):
    write(writer, 0)
    threading.Timer(0.05, gate.set).start()
    writer.close(complete=False)
    rank = load_run(tmp_path / "run").ranks[0]
    assert rank.steps == (0,)
    assert not rank.complete


def test_a_step_that_the_framework_ran_twice_keeps_both_files(tmp_path, writer, gate):
    write(writer, 0)
    payload = {1: HostTensor(bits=np.full(4, 9, np.uint8), dtype="uint8")}
    writer.write_step(0, [record(1, 0)], payload, microbatches=1)
    gate.set()
    writer.close(complete=True)
    rank = load_run(tmp_path / "run").ranks[0]
    assert sorted(path.name for path in (tmp_path / "run" / "rank00000").glob("step*")) == [
        "step000000.mb000.r1.safetensors",
        "step000000.mb000.safetensors",
    ]
    assert [int(rank.payload(record).bits[0]) for record in rank.records] == [0, 9]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("ending", ["another step", "close"])
def test_a_full_disk_is_said_once_and_what_was_whole_stays_readable(tmp_path, writer, ending):
    write(writer, 0)
    writer._jobs.finish()
    whole, writer._file = writer._file, Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
    whole.close()
    write(writer, 1)
    writer._jobs.finish()
    if ending == "another step":
        with pytest.raises(DumpError, match="cannot write: No space left"):
            write(writer, 2)
        with pytest.raises(DumpError, match="an earlier step could not be written"):
            write(writer, 3)
        writer.close(complete=False)
    else:
        with pytest.raises(DumpError, match="cannot write: No space left"):
            writer.close(complete=True)
    rank = load_run(tmp_path / "run").ranks[0]
    assert rank.steps == (0,)
    assert not rank.complete


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_neither_writes_nor_waits(tmp_path, writer, gate):
    write(writer, 0)
    child = os.fork()
    if not child:  # a worker of a data loader, say: the thread is not there, and its locks may be held
        signal.alarm(30)
        writer._jobs.finish()
        try:
            write(writer, 1)
        except DumpError:
            os._exit(7)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    gate.set()
    writer.close(complete=True)
    assert load_run(tmp_path / "run").ranks[0].steps == (0,)


UNCLOSED = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_background import write
from mindspeed_precision.dump.writer import RankWriter, create_run
from mindspeed_precision.records import RankCoordinates

run = Path(sys.argv[1])
create_run(run, {"parallel": {"world_size": 1}})
writer = RankWriter(run, coordinates=RankCoordinates(), queue=1 << 20)
writer._jobs.put(lambda: time.sleep(0.3), 1)
for step in range(3):
    write(writer, step)
"""


@pytest.mark.parametrize("ending", ["", "sys.exit(3)", "raise KeyboardInterrupt", "1 / 0"])
def test_a_process_that_ends_unclosed_writes_what_waits_first(tmp_path, ending):
    program = textwrap.dedent(UNCLOSED) + ending
    here = str(Path(__file__).parent)
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run"), here],
        env=os.environ,
        timeout=60,
        check=False,
        capture_output=True,
    )
    rank = load_run(tmp_path / "run").ranks[0]
    assert rank.steps == (0, 1, 2)
    assert not rank.complete
