"""Start trainings as forks of a server that has imported torch and Megatron."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from mindspeed_precision.errors import ExternalCommandError
from mindspeed_precision.testing.demo.fork_server import READY
from mindspeed_precision.testing.demo.launch import CompletedRun, completed, free_port, training_environment

STARTED_WITHIN = 300
"""Seconds that the imports may take; on an idle machine six."""


class ForkedTrainings:
    """Trainings, one after the other, each rank a fork of one server.

    A context manager: the server is started by the first training and ended with the context.

    Args:
        megatron: directory that holds the package ``megatron``; None when it is importable anyway.
    """

    def __init__(self, megatron: Path | None = None) -> None:
        self._megatron = megatron
        self._server: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  open as long as this is
        self._unread = b""

    def __enter__(self) -> ForkedTrainings:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._errors.close()

    def run(
        self,
        script: Sequence[str],
        *,
        processes: int = 1,
        environment: Mapping[str, str] | None = None,
        log: Path,
        timeout: float = 300,
    ) -> CompletedRun:
        """Run ``script`` (its path and its arguments) under the CPU layer, and wait for it.

        Args:
            script: a training script that knows nothing of the layer, and its arguments.
            processes: how many ranks.
            environment: variables on top of this process's and of those that are pinned (one thread).
            log: file that gets everything they print; its directory is made.
            timeout: seconds after which it is stopped, and the server with it.

        Raises:
            ExternalCommandError: it ended with another status than 0, or not in time; or the server did not
                start.
        """
        if self._server is not None and self._server.poll() is not None:  # somebody killed it
            self.close()
        server = self._server or self._start()
        log.parent.mkdir(parents=True, exist_ok=True)
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        shared = {**training_environment(self._megatron, environment or {}), **address}
        ranks = [{**shared, **_rank(number, processes)} for number in range(processes)]
        request = {"script": list(script), "ranks": ranks, "log": str(log)}
        assert server.stdin is not None
        server.stdin.write(json.dumps(request).encode() + b"\n")
        server.stdin.flush()
        answer = self._answer(timeout)
        if answer is None:
            self.close()
        status = int(answer) if answer else None
        return completed(status, what=Path(script[0]).name, log=log, timeout=timeout)

    def close(self) -> None:
        """End the server, and what it still trains."""
        server, self._server = self._server, None
        self._unread = b""
        if server is None:
            return
        for stream in (server.stdin, server.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # it ended before it had read all
                    stream.close()
        try:
            server.wait(timeout=5)  # its input ended
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, 9)
            server.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        server = subprocess.Popen(
            [sys.executable, "-m", "mindspeed_precision.testing.demo.fork_server"],
            env=training_environment(self._megatron, {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # a training that hangs is ended with its server
        )
        self._server = server
        if self._answer(STARTED_WITHIN) != READY:
            self.close()
            self._errors.seek(0)
            said = self._errors.read().decode("utf-8", errors="replace").strip().splitlines()
            raise ExternalCommandError(
                "torch and Megatron could not be imported",
                where="demo",
                found=said[-1] if said else "nothing",
                remedy='install the demo\'s extra, pip install "mindspeed-precision[demo]", and put '
                "megatron-core on PYTHONPATH; or start it by `make demo`",
            )
        return server

    def _answer(self, timeout: float) -> str | None:
        """Return the next line of the server; None where it ended, or said nothing in ``timeout`` seconds."""
        assert self._server is not None
        assert self._server.stdout is not None
        stream = self._server.stdout.fileno()
        until = time.monotonic() + timeout
        while b"\n" not in self._unread:
            if not select.select([stream], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            if not (read := os.read(stream, 4096)):
                return None
            self._unread += read
        line, self._unread = self._unread.split(b"\n", 1)
        return line.decode()


def _rank(number: int, processes: int) -> dict[str, str]:
    """Return what torchrun tells a rank of one machine."""
    world = str(processes)
    return {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
    }
