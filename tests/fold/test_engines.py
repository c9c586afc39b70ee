"""Processes that read: one that dies is replaced, and one that always dies is an error."""

from __future__ import annotations

import os
import signal
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
