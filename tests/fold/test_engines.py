"""Processes that read: one that dies is replaced, and one that always dies is an error."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from mindspeed_precision.engines import Resources, outcomes
from mindspeed_precision.errors import PrecisionError


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
