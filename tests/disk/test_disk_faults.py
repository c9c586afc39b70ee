"""The disk fails in the middle of a training: it goes on, one line is said, what was whole stays readable."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("torch")

from plain_training import STEPS, train

from mindspeed_precision.dump import writer
from mindspeed_precision.dump.background import Background
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.errors import DumpError
from mindspeed_precision.records import INIT_STEP

pytestmark = pytest.mark.torch

HERE = Path(__file__).parent
QUEUES = ["write_queue_mib=0", "write_queue_mib=64"]
FAILS_AFTER = 2


@pytest.fixture(scope="module")
def plain() -> list[float]:
    """Return the losses of a training that nobody looks at."""
    return train()


@pytest.fixture
def small_disk(tmp_path):
    """Return a function that makes a file system of so many KiB, and one that remounts it."""
    where = tmp_path / "disk"
    where.mkdir()

    def mount(*words: str) -> Path:
        made = subprocess.run(["mount", *words, str(where)], capture_output=True, text=True, check=False)
        if made.returncode:
            pytest.skip(f"a file system of its own needs the right to mount: {made.stderr.strip()}")
        return where

    yield mount
    subprocess.run(["umount", str(where)], capture_output=True, check=False)


def our_lines(capfd) -> list[str]:
    return lines_about_failures(capfd.readouterr().err)


def lines_about_failures(text: str) -> list[str]:
    """Return what we said but for what every recording says at its start and end."""
    ordinary = r"recording |recorded |stopped by |next: "
    return [line for line in text.splitlines() if re.match(rf"mindspeed-precision: (?!{ordinary})", line)]


def require_whole(run_directory: Path, *, at_most: int = STEPS) -> int:
    """Read every record and every element; return how many steps there are, in one piece from the first."""
    run = load_run(run_directory)
    rank = run.ranks[0]
    assert not rank.complete
    assert rank.steps == (INIT_STEP, *range(len(rank.steps) - 1))
    assert len(rank.steps) - 1 <= at_most
    for record in rank.records:
        if record.payload is not None:
            assert rank.payload(record).bits.nbytes
    return len(rank.steps) - 1


def require_said(capfd, *words: str) -> None:
    (line,) = our_lines(capfd)
    for word in ("training goes on", *words):
        assert word in line


@pytest.mark.parametrize("queue", QUEUES)
def test_a_disk_that_is_full(plain, small_disk, capfd, queue):
    disk = small_disk("-t", "tmpfs", "-o", "size=320k", "tmpfs")
    assert train(disk / "run", overrides=[queue]) == plain
    require_said(capfd, "No space left on device")
    assert 1 <= require_whole(disk / "run") < STEPS


def test_a_disk_that_becomes_read_only(plain, small_disk, capfd):
    disk = small_disk("-t", "tmpfs", "-o", "size=32m", "tmpfs")
    gone = []

    def after(step: int) -> None:
        if step == FAILS_AFTER:
            # an index that is open for writing would keep it busy
            descriptor = next(
                int(entry.name)
                for entry in Path("/proc/self/fd").iterdir()
                if os.path.realpath(entry).endswith("index.jsonl")
            )
            shut = os.open(disk / "run" / "rank00000" / "index.jsonl", os.O_RDONLY)
            os.dup2(shut, descriptor)
            os.close(shut)
            small_disk("-o", "remount,ro")
            gone.append(step)

    assert train(disk / "run", overrides=["write_queue_mib=0"], after=after) == plain
    assert gone
    require_said(capfd, "Read-only file system")
    assert require_whole(disk / "run") == FAILS_AFTER + 1


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("level", ["tensor", "statistics"])
def test_a_directory_that_vanishes(plain, tmp_path, capfd, queue, level):
    def after(step: int) -> None:
        if step == FAILS_AFTER:
            while (tmp_path / "run").exists():  # a thread may be writing into it
                shutil.rmtree(tmp_path / "run", ignore_errors=True)

    assert train(tmp_path / "run", overrides=[queue, f"capture.level={level}"], after=after) == plain
    require_said(capfd)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("queue", QUEUES)
def test_a_file_system_whose_rename_fails(plain, tmp_path, capfd, monkeypatch, queue):
    real = Path.replace

    def replace(self, target):
        if self.name.startswith("step") and f"step{FAILS_AFTER:06d}" in self.name:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    assert train(tmp_path / "run", overrides=[queue]) == plain
    require_said(capfd, os.strerror(errno.EOPNOTSUPP))
    assert require_whole(tmp_path / "run") == FAILS_AFTER
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("queue", QUEUES)
def test_a_disk_that_does_not_flush(plain, tmp_path, capfd, monkeypatch, queue):
    real, left = os.fsync, [20]

    def fsync(descriptor):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    monkeypatch.setattr(writer.os, "fsync", fsync)
    assert train(tmp_path / "run", overrides=[queue]) == plain
    require_said(capfd, os.strerror(errno.EIO))
    assert require_whole(tmp_path / "run") < STEPS


def test_a_process_that_may_start_no_thread(plain, tmp_path, capfd, monkeypatch):
    begun, allowed = [], [10**6]

    def start(self):
        if self.name == "precision-writer":
            begun.append(self)
            if len(begun) > allowed[0]:
                raise RuntimeError("can't start new thread")
        return real(self)

    def put(self, job, size):
        self.finish()  # the thread that wrote before has ended: each job needs one of its own
        return put_as_it_is(self, job, size)

    real, put_as_it_is = threading.Thread.start, Background.put
    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(Background, "put", put)
    assert train(tmp_path / "whole") == plain
    capfd.readouterr()
    allowed[0] = len(begun) - 2
    begun.clear()
    assert train(tmp_path / "run") == plain
    require_said(capfd, "can't start new thread")
    require_whole(tmp_path / "run")


def test_a_file_that_may_grow_no_more(plain, tmp_path):
    """RLIMIT_FSIZE stands for a quota; in a process of its own."""
    program = (
        "import resource, signal, sys; from pathlib import Path; from plain_training import train; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "
        "print(train(Path(sys.argv[1])))"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == str(plain)
    (line,) = lines_about_failures(ended.stderr)
    assert os.strerror(errno.EFBIG) in line
    assert 0 <= require_whole(tmp_path / "run") < STEPS


def test_a_directory_that_cannot_be_made_refuses_at_the_start(small_disk, tmp_path):
    disk = small_disk("-t", "tmpfs", "-o", "size=1m,ro", "tmpfs")
    with pytest.raises(DumpError, match="cannot make this run directory: Read-only file system"):
        train(disk / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(DumpError, match="cannot make this run directory"):
        train(tmp_path / "file" / "run")


def test_a_second_run_into_the_same_directory_is_refused_and_changes_nothing(tmp_path):
    train(tmp_path / "run", steps=2)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(DumpError, match="not empty, and nothing is overwritten"):
        train(tmp_path / "run", steps=3)
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert after == before


def test_a_restart_into_the_directory_of_a_run_that_was_killed_is_refused(tmp_path):
    train(tmp_path / "run", steps=2)
    (tmp_path / "run" / "rank00000" / "COMPLETE").unlink()
    with pytest.raises(DumpError, match="not empty"):
        train(tmp_path / "run")
    assert load_run(tmp_path / "run").ranks[0].steps == (INIT_STEP, 0, 1)
