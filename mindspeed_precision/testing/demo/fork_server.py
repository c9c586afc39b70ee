"""A process that imports torch and Megatron once; the ranks of each training are forks of it.

``python -m mindspeed_precision.testing.demo.fork_server`` reads one JSON object per line: ``script`` (the
words that would stand behind ``python -m mindspeed_precision.testing.cpu``), ``ranks`` (the environment of
each, whole) and ``log``. It forks, runs them there, and answers with one line, the exit status. The imports
take longer than the trainings of the demo.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path

from mindspeed_precision.pretrain import register_flags_with_megatron
from mindspeed_precision.testing import cpu

READY = "ready"
PRELOADED = ("torch._inductor", "megatron.training", "mindspeed_precision.session")
"""What a training would import first, and what changes nothing until it is called."""

BEFORE = frozenset(os.environ)
"""What the environment had before the layer: what it sets for a training stays."""


def serve() -> None:
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what an import prints is no answer
    cpu.install()
    for name in PRELOADED:
        importlib.import_module(name)
    _answer(answers.fileno(), READY)
    for line in sys.stdin:
        request = json.loads(line)
        log = Path(request["log"])
        log.write_bytes(b"")
        ranks = []
        for environment in request["ranks"]:
            ranks.append(os.fork())
            if ranks[-1] == 0:
                os.close(answers.fileno())
                _train(request["script"], environment, log)
        _answer(answers.fileno(), str(_wait(ranks)))


def _wait(ranks: list[int]) -> int:
    """Wait for all ranks; return the first status that is not 0. One that fails ends the others."""
    running, first = set(ranks), 0
    while running:
        rank, status = os.wait()
        running.discard(rank)
        status = os.waitstatus_to_exitcode(status)
        if status and not first:
            first = status
            for other in running:
                os.kill(other, signal.SIGKILL)
    return first


def _answer(stream: int, text: str) -> None:
    os.write(stream, f"{text}\n".encode())


def _train(script: list[str], environment: dict[str, str], log: Path) -> None:
    """Run the script in this fork, with its output in ``log``; never returns."""
    status = 1
    try:
        stream = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        for name in BEFORE - environment.keys():
            os.environ.pop(name, None)
        os.environ.update(environment)
        added = environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[1:1] = [path for path in added if path and path not in sys.path]
        sys.argv = script
        register_flags_with_megatron()  # an import does it; here that came before the arguments
        sys.path[0] = str(Path(script[0]).resolve().parent)  # where python itself would have put it
        runpy.run_path(script[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  a fork must not return into the server, whatever ends it
        traceback.print_exc()
    finally:
        for helper in multiprocessing.active_children():  # as an interpreter does that ends
            helper.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
