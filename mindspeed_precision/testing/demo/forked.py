"""Start trainings of one process as forks of a server that has imported torch and Megatron."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from mindspeed_precision.errors import ExternalCommandError
from mindspeed_precision.testing.demo.fork_server import READY
from mindspeed_precision.testing.demo.launch import CompletedRun, completed, free_port, training_environment

STARTED_WITHIN = 300
"""Seconds that the imports may take; on an idle machine six."""


class ForkedTrainings:
    """Trainings of one process each, one after the other, as forks of one server.

    A context manager: the server is started by the first training and ended with the context.
    """

    def __init__(self) -> None:
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

    def run(self, script: Sequence[str], *, log: Path, timeout: float = 300) -> CompletedRun:
        """Run ``script`` (its path and its arguments) under the CPU layer, and wait for it.

        Args:
            script: a training script that knows nothing of the layer, and its arguments.
            log: file that gets everything it prints; its directory is made.
            timeout: seconds after which it is stopped, and the server with it.

        Raises:
            ExternalCommandError: it ended with another status than 0, or not in time; or the server did not
                start.
        """
        server = self._server or self._start()
        log.parent.mkdir(parents=True, exist_ok=True)
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        request = {"script": list(script), "environment": {**rank, **address}, "log": str(log)}
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
                stream.close()
        try:
            server.wait(timeout=5)  # its input ended
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, 9)
            server.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        server = subprocess.Popen(
            [sys.executable, "-m", "mindspeed_precision.testing.demo.fork_server"],
            env=training_environment(None, {}),
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
