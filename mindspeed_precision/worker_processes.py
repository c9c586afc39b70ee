"""Processes of this machine that do tasks, each behind a pipe of its own; one that dies is replaced.

``concurrent.futures`` has one pipe and one lock for the answers of all: a process that is killed while it
sends one (by the out-of-memory killer, which comes when much is sent) leaves half an answer, for the rest of
which everybody waits for ever. Here the end of a process is the end of its pipe.
"""

from __future__ import annotations

import copy
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from threading import Lock
from types import TracebackType
from typing import Any, TypeVar

from mindspeed_precision.errors import PrecisionError

Task = TypeVar("Task")
Outcome = TypeVar("Outcome")


class ProcessDiedError(Exception):
    """The process that did a task is gone, and has not answered."""


class ElsewhereError(Exception):
    """Where in the other process an error was raised; the cause of the error that is raised here."""

    def __str__(self) -> str:
        """Return the traceback as it was there."""
        return f"\n\n{self.args[0]}"


class WorkerProcesses:
    """A number of processes, started when they are needed.

    They are spawned, not forked: the caller may have threads. Each does one task at a time; as many threads
    of the caller as there are processes may ask at once.
    """

    def __init__(self, count: int) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._idle: SimpleQueue[tuple[BaseProcess, Connection] | None] = SimpleQueue()
        self._started: list[BaseProcess] = []
        self._starting = Lock()
        self._closed = False
        for _ in range(count):
            self._idle.put(None)

    def do(self, function: Callable[[Task], Outcome], task: Task) -> Outcome:
        """Return what a function gives of a task.

        Args:
            function: of a module, so that another process finds it.
            task: can be pickled, as the outcome can.

        Raises:
            ProcessDiedError: the process did not live to answer; another takes its place.
            PrecisionError: no process can be started.
            Exception: what the function raised; its cause tells where.
        """
        worker = self._idle.get()
        try:
            worker = worker or self._start()
            answered, outcome, told = _asked(worker[1], function, task)
        except BaseException:  # also one that leaves a part of the answer in the pipe
            _end(worker)
            worker = None
            raise
        finally:
            self._idle.put(worker)
        if not answered:
            raise outcome from ElsewhereError(told)
        return outcome  # type: ignore[no-any-return]

    def _start(self) -> tuple[BaseProcess, Connection]:
        try:
            ours, theirs = self._context.Pipe()
            with theirs, self._starting:  # the last one that has theirs open is the process: its end is seen
                if self._closed:
                    raise ProcessDiedError
                process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
                with _without_interrupt():
                    process.start()
                self._started.append(process)
        except OSError as error:
            remedy = "allow more processes or files (`ulimit -u`, `ulimit -n`), or read with fewer: --jobs"
            raise PrecisionError(
                f"no process can be started to read with: {error.strerror}", remedy=remedy
            ) from error
        return process, ours

    def __enter__(self) -> WorkerProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all processes, also those that are at a task; who waits for one gets ProcessDiedError."""
        with self._starting:  # one that is being started is known afterwards
            self._closed = True
        for process in self._started:
            process.kill()
        for process in self._started:
            process.join()


def _asked(connection: Connection, function: Callable[[Task], Outcome], task: Task) -> tuple[bool, Any, str]:
    try:
        connection.send((function, task))
        answer: tuple[bool, Any, str] = connection.recv()
    except (EOFError, OSError) as error:
        raise ProcessDiedError from error
    return answer


def _end(worker: tuple[BaseProcess, Connection] | None) -> None:
    if worker is not None:
        process, connection = worker
        connection.close()
        process.kill()  # a pipe can break without a death
        process.join()


@contextmanager
def _without_interrupt() -> Iterator[None]:
    """Block the terminal's interrupt in this thread: a process that it starts has it blocked from the first.

    It is for the caller, who ends the processes.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # it would unblock it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: Connection) -> None:
    """Do tasks until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, OSError):  # the caller is gone
        while True:
            try:
                function, task = connection.recv()
            except (ImportError, AttributeError) as error:  # this process does not find the function
                _refuse(connection, error)
                continue
            _answer(connection, function, task)


def _answer(connection: Connection, function: Callable[[Task], Outcome], task: Task) -> None:
    try:
        connection.send((True, function(task), ""))
    except Exception as error:  # noqa: BLE001  the caller's, also where an outcome cannot be pickled
        _refuse(connection, error)


def _refuse(connection: Connection, error: Exception) -> None:
    """Send an error; in the place of one that cannot be sent, or not be made again there, its text."""
    told = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        copy.copy(error)
        connection.send((False, error, told))
    except OSError:
        raise
    except Exception:  # noqa: BLE001  whatever making it raises
        connection.send((False, RuntimeError(f"{type(error).__name__}: {error}"), told))
