"""Who reads the ranks: this process, several of this machine, or the workers of Dask.

Each gives the outcomes in the order of the tasks, so that the answer does not depend on who came first, and
has few tasks under way, so that memory does not depend on how many there are. A worker that dies is replaced
and its tasks are done again.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from mindspeed_precision.errors import ConfigError, PrecisionError
from mindspeed_precision.worker_processes import ProcessDiedError, WorkerProcesses

Task = TypeVar("Task")
Outcome = TypeVar("Outcome")

GIBIBYTE = 1 << 30
LOCAL = "local"
"""In the place of a scheduler's address: a cluster of this machine."""

_AHEAD = 4
"""Tasks under way for each worker."""

_PATIENCE = 60
"""Seconds in which a scheduler's first worker must come."""

_DEATHS = 3
"""So many processes may die at a task before it is taken for a fault of the task."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a comparison may use.

    Attributes:
        memory: bytes; larger runs are folded.
        jobs: processes; None: one for each core.
        dask: address of a scheduler, ``local``, or empty for none.
    """

    memory: int = 2 * GIBIBYTE
    jobs: int | None = None
    dask: str = ""

    @property
    def workers(self) -> int:
        """Processes to read with."""
        if self.jobs is not None:
            return self.jobs
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def outcomes(
    function: Callable[[Task], Outcome], tasks: Sequence[Task], resources: Resources
) -> Iterator[Outcome]:
    """Yield what a function gives of each task, in the order of the tasks.

    Args:
        function: of a module, so that other processes find it.
        tasks: can be pickled.
        resources: who works.

    Raises:
        ConfigError: Dask is asked for and is not there, or has no worker.
        PrecisionError: workers died again and again.
    """
    if resources.dask:
        yield from _by_dask(function, tasks, resources)
    elif resources.workers > 1 and len(tasks) > 1 and not _is_daemon():
        yield from _by_processes(function, tasks, resources.workers)
    else:
        yield from map(function, tasks)


def _is_daemon() -> bool:
    """Tell whether this process may start none.

    Raises:
        PrecisionError: it is one of ours, which has not yet come to its task.
    """
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):
        raise PrecisionError(
            "each process that reads the runs begins with the script that started it",
            remedy='put what it calls behind `if __name__ == "__main__":`, or read with one process (jobs=1)',
        )
    return process.daemon


def _by_processes(
    function: Callable[[Task], Outcome], tasks: Sequence[Task], workers: int
) -> Iterator[Outcome]:
    workers = min(workers, len(tasks))
    threads = ThreadPoolExecutor(workers)  # one waits for each process
    try:
        with WorkerProcesses(workers) as processes:
            ask = partial(_until_done, processes, function)
            yield from _in_order((threads.submit(ask, task) for task in tasks), workers)
    finally:
        threads.shutdown(cancel_futures=True)


def _until_done(processes: WorkerProcesses, function: Callable[[Task], Outcome], task: Task) -> Outcome:
    for _ in range(_DEATHS):
        with suppress(ProcessDiedError):
            return processes.do(function, task)
    raise _dead(task)


def _in_order(submitted: Iterator[Future[Outcome]], workers: int) -> Iterator[Outcome]:
    """Yield results in order; so many are under way that no worker waits."""
    waiting: deque[Future[Outcome]] = deque(islice(submitted, _AHEAD * workers))
    while waiting:
        yield waiting.popleft().result()
        waiting.extend(islice(submitted, 1))


def _by_dask(
    function: Callable[[Task], Outcome], tasks: Iterable[Task], resources: Resources
) -> Iterator[Outcome]:
    if importlib.util.find_spec("distributed") is None:
        raise ConfigError(
            "Dask is not installed", where="--dask", remedy="pip install mindspeed-precision[dask]"
        )
    from distributed import KilledWorker

    with _client(resources) as client:
        workers = max(len(client.scheduler_info(n_workers=-1)["workers"]), 1)
        submitted = (client.submit(function, task, pure=False) for task in tasks)
        try:
            yield from _in_order(submitted, workers)
        except KilledWorker as error:
            raise _dead(function.__name__) from error


@contextmanager
def _client(resources: Resources) -> Iterator[Any]:
    from distributed import Client, LocalCluster

    if resources.dask != LOCAL:
        if re.fullmatch(r"([a-z]+://)?[^/\s]+:\d+/?", resources.dask) is None:  # a client would not end
            found, expected = (
                repr(resources.dask),
                "tcp://HOST:PORT, or nothing for a cluster of this machine",
            )
            raise ConfigError("no address", where="--dask", found=found, expected=expected)
        try:
            connected = Client(resources.dask, timeout="10s")
        except OSError as error:
            remedy = "start it with `dask scheduler`, and workers with `dask worker ADDRESS`"
            raise ConfigError(
                f"no scheduler of Dask answers: {error}", where=resources.dask, remedy=remedy
            ) from error
        with connected as client:
            _require_workers(client, resources.dask)
            yield client
        return
    with (
        LocalCluster(
            n_workers=resources.workers, threads_per_worker=1, processes=True, dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def _require_workers(client: Any, address: str) -> None:
    from distributed import TimeoutError as NoneCameError

    try:
        client.wait_for_workers(1, timeout=_PATIENCE)
    except NoneCameError as error:
        remedy = f"start some with `dask worker {address}`"
        raise ConfigError(
            f"no worker has joined this scheduler in {_PATIENCE} s", where=address, remedy=remedy
        ) from error


def _dead(task: object) -> PrecisionError:
    return PrecisionError(
        "the processes that read the runs died again and again",
        found=f"at {str(task)[:200]}",
        remedy="look for what kills them: the out-of-memory killer (`dmesg`), a batch system's limit; "
        "with --jobs 1 one process reads, and shows what happens",
    )
