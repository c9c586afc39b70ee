"""Processes that read: one that dies is replaced, and one that always dies is an error."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Thread

import pytest

from mindspeed_precision.engines import Resources, outcomes
from mindspeed_precision.errors import PrecisionError
from mindspeed_precision.worker_processes import ProcessDiedError, WorkerProcesses


def die_once(task: tuple[Path, int]) -> int:
    """End the process that does the third task for the first time, as the out-of-memory killer does."""
    marker, number = task
    if number == 3 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def die_in_an_answer(task: tuple[Path, int]) -> bytes:
    """End the process when half of the third answer is sent, for the first time."""
    marker, number = task
    if number == 3 and not marker.exists():
        marker.touch()

        def half(connection: Connection, message: memoryview, write: Callable[..., int] = os.write) -> None:
            write(connection.fileno(), bytes(message)[: len(message) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        Connection._send = half  # type: ignore[attr-defined]
    return bytes([number]) * 1000


def refuse(task: int) -> int:
    """Raise, or give what no pipe takes."""
    if task == 1:
        raise PrecisionError("this task is refused", where="here")
    return lambda: task  # type: ignore[return-value]


def die(task: int) -> int:
    """End every process that does it."""
    os.kill(os.getpid(), signal.SIGKILL)
    return task


def test_a_process_that_is_killed_is_replaced(tmp_path):
    tasks = [(tmp_path / "died", number) for number in range(6)]
    assert list(outcomes(die_once, tasks, Resources(jobs=2))) == list(range(6))
    assert (tmp_path / "died").exists()


def test_processes_that_always_die_are_an_error_and_no_endless_loop():
    with pytest.raises(PrecisionError, match="died again and again"):
        list(outcomes(die, [1, 2], Resources(jobs=2)))


def test_a_process_that_is_killed_in_the_middle_of_an_answer_is_replaced(tmp_path):
    """With one pipe for the answers of all, everybody waited for the other half."""
    tasks = [(tmp_path / "died", number) for number in range(6)]
    found = list(outcomes(die_in_an_answer, tasks, Resources(jobs=2)))
    assert found == [bytes([number]) * 1000 for number in range(6)]
    assert (tmp_path / "died").exists()


@pytest.mark.parametrize(("task", "said"), [(1, "this task is refused"), (2, "pickle")])
def test_what_a_task_raises_is_raised_here(task, said):
    with pytest.raises(Exception, match=said):
        list(outcomes(refuse, [task, task], Resources(jobs=2)))


def test_who_stops_asking_leaves_no_process(tmp_path):
    before = set(multiprocessing.active_children())
    answers = outcomes(die_once, [(tmp_path, number) for number in range(6)], Resources(jobs=2))
    assert next(answers) == 0
    assert set(multiprocessing.active_children()) > before
    answers.close()  # type: ignore[attr-defined]
    assert set(multiprocessing.active_children()) == before


class UnmakeableError(Exception):
    """Cannot be made again from its arguments, as many errors of libraries cannot."""

    def __init__(self, *, place: str) -> None:
        super().__init__(f"wrong at {place}")


class UnsendableError(Exception):
    """Holds what no pipe takes."""

    def __init__(self) -> None:
        super().__init__("holds a function", lambda: 0)


def raise_odd(task: str) -> None:
    """Raise an error that does not come over a pipe."""
    raise UnmakeableError(place="home") if task == "unmakeable" else UnsendableError


class Lost:
    """Not found where it is unpickled."""

    def __reduce__(self):
        return getattr, (Path, "no_such_function")


@pytest.mark.parametrize(
    ("task", "said"),
    [("unmakeable", "UnmakeableError: wrong at home"), ("unsendable", "UnsendableError: .*a function")],
)
def test_an_error_that_does_not_come_over_the_pipe_comes_as_its_text(task, said):
    with pytest.raises(RuntimeError, match=said):
        list(outcomes(raise_odd, [task, task], Resources(jobs=2)))


def test_an_error_tells_where_it_was_raised():
    with pytest.raises(PrecisionError, match="refused") as caught:
        list(outcomes(refuse, [1, 1], Resources(jobs=2)))
    assert "in refuse" in str(caught.value.__cause__)


def test_a_task_that_the_process_cannot_read_is_no_death():
    with pytest.raises(AttributeError, match="no_such_function"):
        list(outcomes(refuse, [Lost(), Lost()], Resources(jobs=2)))


def test_a_process_that_cannot_be_started_is_no_death(monkeypatch):
    def fail(self: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", fail)
    with pytest.raises(
        PrecisionError, match=r"no process can be started .*temporarily unavailable; .*--jobs"
    ):
        list(outcomes(refuse, [2, 2], Resources(jobs=2)))


def test_a_process_that_is_started_while_all_end_is_ended_too(monkeypatch):
    """It was never killed; a moment later, the caller would have waited for it for ever."""
    start, begun, go_on = multiprocessing.process.BaseProcess.start, Event(), Event()

    def slow(process: multiprocessing.process.BaseProcess) -> None:
        begun.set()
        go_on.wait(10)
        start(process)

    def ask() -> None:
        with suppress(ProcessDiedError):
            processes.do(abs, -1)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", slow)
    before = set(multiprocessing.active_children())
    processes = WorkerProcesses(1)
    asking, ending = Thread(target=ask), Thread(target=processes.__exit__, args=(None, None, None))
    asking.start()
    begun.wait(10)
    ending.start()
    ending.join(0.2)
    go_on.set()
    asking.join()
    ending.join()
    assert set(multiprocessing.active_children()) == before


def by_several_in_a_daemon(answer: Connection) -> None:
    """Ask for several processes where none may be started."""
    answer.send(list(outcomes(abs, [-1, -2], Resources(jobs=2))))


def test_a_process_that_may_start_none_reads_by_itself():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=by_several_in_a_daemon, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    assert ours.recv() == [1, 2]
    process.join()


INTERRUPTIBLE = """
import signal
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
"""
SCRIPT = """
import os, sys, time
from mindspeed_precision.engines import Resources, outcomes
{guard}list(outcomes({function}, [{task}, {task}], Resources(jobs=2)))
"""


def started(tmp_path: Path, **parts: str) -> subprocess.Popen[str]:
    """Start a script in a group of processes of its own, which an interrupt ends: as a terminal does.

    What a shell starts behind itself, as these tests may be, ignores it, and so does what that starts.
    """
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTIBLE + SCRIPT.format(**parts))
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(group: int) -> bool:
    """Wait until no process of a group is left; Python's own tracker of resources ends a moment after."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_a_script_that_begins_again_in_each_process_is_told_so(tmp_path):
    _, told = started(tmp_path, guard="", function="abs", task="-1").communicate(timeout=60)
    assert 'put what it calls behind `if __name__ == "__main__":`' in told


@pytest.mark.parametrize("after", [0.5, 0.7, 0.9, 2])
def test_an_interrupt_of_the_terminal_is_the_callers_alone(tmp_path, after):
    """Processes that were still starting told their own tracebacks between its."""
    process = started(tmp_path, guard='if __name__ == "__main__": ', function="time.sleep", task="60")
    time.sleep(after)
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=20)
    assert process.returncode in (-signal.SIGINT, 130)
    assert "spawn_main" not in told
    assert ended(process.pid)


def test_a_caller_that_is_killed_leaves_nothing_and_no_traceback(tmp_path):
    process = started(tmp_path, guard='if __name__ == "__main__": ', function="time.sleep", task="3")
    time.sleep(2)
    process.kill()
    _, told = process.communicate(timeout=30)  # ends when the last process has closed stderr
    assert told == ""
