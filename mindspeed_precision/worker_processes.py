"""Processes of this machine that do tasks, each behind a pipe of its own; one that dies is replaced.

``concurrent.futures`` has one pipe and one lock for the answers of all: a process that is killed while it
sends one (by the out-of-memory killer, which comes when much is sent) leaves half an answer, for the rest of
which everybody waits for ever. Here the end of a process is the end of its pipe.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from types import TracebackType
from typing import TypeVar

Task = TypeVar("Task")
Outcome = TypeVar("Outcome")


class ProcessDiedError(Exception):
    """The process that did a task is gone, and has not answered."""


class WorkerProcesses:
    """A number of processes, started when they are needed.

    They are spawned, not forked: the caller may have threads. Each does one task at a time; as many threads
    of the caller as there are processes may ask at once.
    """

    def __init__(self, count: int) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._idle: SimpleQueue[tuple[BaseProcess, Connection] | None] = SimpleQueue()
        self._started: list[BaseProcess] = []
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
            Exception: what the function raised.
        """
        worker = self._idle.get()
        try:
            process, connection = worker or self._start()
            worker = process, connection
            connection.send((function, task))
            answered, outcome = connection.recv()
        except (EOFError, OSError) as error:
            _end(worker)
            worker = None
            raise ProcessDiedError from error
        finally:
            self._idle.put(worker)
        if not answered:
            raise outcome
        return outcome  # type: ignore[no-any-return]

    def _start(self) -> tuple[BaseProcess, Connection]:
        if self._closed:
            raise EOFError
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()  # the last one that has it open is the process, so that its end is seen
        self._started.append(process)
        return process, ours

    def __enter__(self) -> WorkerProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all processes, also those that are at a task; who waits for one gets ProcessDiedError."""
        self._closed = True
        for process in self._started:
            process.kill()
        for process in self._started:
            process.join()


def _end(worker: tuple[BaseProcess, Connection] | None) -> None:
    if worker is not None:
        process, connection = worker
        connection.close()
        process.kill()  # a pipe can break without a death
        process.join()


def _serve(connection: Connection) -> None:
    """Do tasks until the pipe ends. An interrupt of the terminal is for the caller, who ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError):
        while True:
            function, task = connection.recv()
            try:
                connection.send((True, function(task)))
            except Exception as error:  # noqa: BLE001  the caller's, also where an outcome cannot be pickled
                connection.send((False, error))
