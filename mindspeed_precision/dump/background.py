"""Work for the disk, done in order on another thread, with bounded memory.

What needs the interpreter (putting records into words) is done before: a thread would take that time from the
training by the interpreter's lock. What is left, writing and flushing, releases the lock.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from mindspeed_precision.errors import DumpError

Job = Callable[[], None]


class Jobs(Protocol):
    """Where a writer's work for the disk goes, in order."""

    def put(self, job: Job, size: int) -> None:
        """Do ``job``, now or later; ``size`` is how many bytes are kept in memory until then.

        Raises:
            DumpError: it, or an earlier one, failed.
        """
        ...

    def finish(self) -> None:
        """Wait until everything is done; an error of a job is raised by the next ``raise_failure``."""
        ...

    def raise_failure(self) -> None:
        """Raise what a job failed with, if that has not been raised yet."""
        ...


class Immediately:
    """Does each job at once."""

    def put(self, job: Job, size: int) -> None:
        """Do it."""
        job()

    def finish(self) -> None:
        """Nothing is left to do."""

    def raise_failure(self) -> None:
        """It was raised by ``put``."""


class Background:
    """Does jobs on a thread that lives while there are some.

    Nothing is dropped: where the jobs that wait would keep more than ``limit`` bytes, ``put`` waits for the
    disk. After a job has failed, none of those behind it is done.

    Args:
        limit: bytes; a single job may keep more than that, and then waits alone.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Job, int]] = deque()
        self._held = 0
        self._working = False
        self._failure: BaseException | None = None
        self._failed = False

    def put(self, job: Job, size: int) -> None:
        """Do ``job`` when those before it are done; wait first where memory is short.

        Raises:
            DumpError: an earlier job failed; or this is a fork of the process that records.
        """
        if os.getpid() != self._process:
            raise DumpError("a fork of the process that records cannot write its records")
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._held + size <= self._limit)
            if not self._failed:
                self._waiting.append((job, size))
                self._held += size
            if self._waiting and not self._working:
                # a process that may start no more threads raises here, with nothing that anybody waits for
                threading.Thread(target=self._work, name="precision-writer", daemon=True).start()
                self._working = True
                atexit.register(self.finish)  # a run that nobody closes keeps its steps
        self.raise_failure()

    def finish(self) -> None:
        """Wait until every job is done, or one has failed. A fork has nothing to wait for."""
        if os.getpid() == self._process:
            with self._changed:
                self._changed.wait_for(lambda: not self._working)

    def raise_failure(self) -> None:
        """Raise what a job failed with, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._working = False
                    atexit.unregister(self.finish)
                    self._changed.notify_all()
                    return
                job, size = self._waiting.popleft()
            try:
                job()
            except BaseException as error:  # noqa: BLE001  raised where the training can see it
                self._fail(error)
            job = None  # type: ignore[assignment]  # what it kept is free before the next one is waited for
            with self._changed:
                self._held -= size
                self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failed, self._failure = True, error
            self._held -= sum(size for _, size in self._waiting)
            self._waiting.clear()
