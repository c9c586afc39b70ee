"""Start a training run on this machine's CPUs, with torch or MindSpore, and read its log as its user does."""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mindspeed_precision.errors import ExternalCommandError

SCRIPT = Path(__file__).with_name("pretrain_gpt.py")
_PACKAGE_ROOT = Path(__file__).resolve().parents[3]
_LAUNCH = _PACKAGE_ROOT / "launch"

# One thread: the order of sums, and so the bits, depends on how many there are.
PINNED = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONHASHSEED": "1234",
}
TAIL_LINES = 30

_ITERATION = re.compile(r"\biteration +(\d+)/ *\d+ \|")
_LOSS = re.compile(r"\| lm loss: (\S+) \|")
_NORM = re.compile(r"\| grad norm: (\S+) \|")


@dataclass(frozen=True, kw_only=True)
class LogRow:
    """One step as Megatron prints it; the printed text is kept, since it is what a user compares.

    Attributes:
        iteration: Megatron's number, from 1.
        loss: the text after ``lm loss:``; empty when the step was skipped. From 0.16 Megatron does not reset
            its sum after the first line of a run: the second line shows the mean of the first two steps.
        grad_norm: the text after ``grad norm:``; empty when none was printed.
    """

    iteration: int
    loss: str
    grad_norm: str


@dataclass(frozen=True, kw_only=True)
class CompletedRun:
    """A training run that ended well.

    Attributes:
        returncode: of torchrun; 0.
        log: where everything that it printed was written.
        rows: the steps, in order.
    """

    returncode: int
    log: Path
    rows: tuple[LogRow, ...]

    @property
    def text(self) -> str:
        """What the run printed, all ranks together."""
        return self.log.read_text(encoding="utf-8", errors="replace")


def run_training(
    script: Path,
    args: Sequence[str],
    *,
    processes: int = 1,
    megatron: Path | None = None,
    environment: Mapping[str, str] | None = None,
    log: Path,
    without: Iterable[str] = (),
    timeout: float = 600,
) -> CompletedRun:
    """Run ``script`` under torchrun and the CPU layer, and wait for it.

    Args:
        script: a training script that knows nothing of the layer.
        args: its arguments.
        processes: how many ranks.
        megatron: directory that holds the package ``megatron``; None when it is importable anyway.
        environment: variables on top of this process's and of those that are pinned (one thread).
        log: file that gets everything it prints; its directory is made.
        without: pieces of the CPU layer to leave out.
        timeout: seconds after which it is stopped.

    Raises:
        ExternalCommandError: it ended with another status than 0, or not in time.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)),
        *("-m", "mindspeed_precision.testing.cpu"),
        *(word for name in without for word in ("--without", name)),
        *(str(script), *args),
    ]
    return _run(
        command, training_environment(megatron, environment or {}), what=script.name, log=log, timeout=timeout
    )


def run_on_mindspore(
    script: Path, args: Sequence[str], *, python: Path, processes: int = 1, log: Path, timeout: float = 600
) -> CompletedRun:
    """Run ``script`` on MindSpore through mindtorch (``launch/mindspore_cpu.sh``), and wait for it.

    Args:
        script: a training script, the same as for ``run_training``.
        args: its arguments.
        python: interpreter of the environment that has MindSpore, mindtorch and megatron-core.
        processes: how many ranks; more than one are started by msrun.
        log: file that gets everything it prints; its directory is made.
        timeout: seconds after which it is stopped.

    Raises:
        ExternalCommandError: it ended with another status than 0, or not in time.
    """
    command = [str(python), "-m", "mindspeed_precision.testing.mindtorch", str(script), *args]
    ranks: Path | None = None
    environment = {**training_environment(None, {}), "PYTHONPATH": str(_PACKAGE_ROOT)}
    if processes > 1:
        command = ["bash", str(_LAUNCH / "mindspore_cpu.sh"), str(script), *args]
        ranks = log.with_name(f"{log.stem}-ranks")
        environment |= {"PYTHON": str(python), "NPROC": str(processes), "MSRUN_LOG_DIR": str(ranks)}
        environment["MASTER_PORT"] = str(free_port())
    return _run(command, environment, what=script.name, log=log, timeout=timeout, ranks=ranks)


def run_twin(args: Sequence[str], *, python: Path, log: Path, timeout: float = 600) -> CompletedRun:
    """Train the native MindSpore twin (``testing.twin``), and wait for it.

    Args:
        args: its arguments.
        python: interpreter of the environment that has MindSpore.
        log: file that gets everything it prints; its directory is made.
        timeout: seconds after which it is stopped.

    Raises:
        ExternalCommandError: it ended with another status than 0, or not in time.
    """
    command = [str(python), "-m", "mindspeed_precision.testing.twin", *args]
    environment = {**training_environment(None, {}), "PYTHONPATH": str(_PACKAGE_ROOT)}
    return _run(command, environment, what="the twin", log=log, timeout=timeout)


def free_port() -> int:
    """Return a port of this machine that nobody listens on.

    It is none of those that a system gives to connections (from 32768 on Linux): one of them would be taken
    by whoever connects next.
    """
    while True:
        port = 16384 + secrets.randbelow(12288)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _run(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    what: str,
    log: Path,
    timeout: float,
    ranks: Path | None = None,
) -> CompletedRun:
    """Run ``command`` with its output in ``log``, and wait for it.

    msrun writes what each rank prints into a file of its own in ``ranks``, and one rank's into ``log``: when
    it fails, all are added.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
        try:
            returncode: int | None = process.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            returncode = None
        finally:
            if process.poll() is None:
                process.terminate()  # a launcher ends its ranks
                process.wait()
    if ranks is not None and returncode != 0:
        with log.open("ab") as stream:
            for part in sorted(ranks.glob("worker_*.log")):
                stream.write(part.read_bytes())
    return completed(returncode, what=what, log=log, timeout=timeout)


def completed(returncode: int | None, *, what: str, log: Path, timeout: float) -> CompletedRun:
    """Return the run that ended with ``returncode``, None for one that did not end in ``timeout`` seconds.

    Raises:
        ExternalCommandError: it ended with another status than 0, or not in time.
    """
    if returncode != 0:
        found = f"stopped after {timeout:g} s" if returncode is None else f"exit status {returncode}"
        raise ExternalCommandError(
            f"the training run failed; its last lines were:\n{_tail(log)}\n",
            where=what,
            found=found,
            expected="exit status 0",
            remedy=f"read {log}",
        )
    return CompletedRun(
        returncode=0, log=log, rows=parse_log(log.read_text(encoding="utf-8", errors="replace"))
    )


def parse_log(text: str) -> tuple[LogRow, ...]:
    """Return the steps that Megatron printed in ``text``."""
    rows = []
    for line in text.splitlines():
        if found := _ITERATION.search(line):
            loss, norm = _LOSS.search(line), _NORM.search(line)
            rows.append(
                LogRow(
                    iteration=int(found.group(1)),
                    loss=loss.group(1) if loss else "",
                    grad_norm=norm.group(1) if norm else "",
                )
            )
    return tuple(rows)


def training_environment(megatron: Path | None, extra: Mapping[str, str]) -> dict[str, str]:
    """Return this process's variables and ``extra``, pinned; ``megatron`` and this package are importable."""
    environment = {**os.environ, **PINNED}
    paths = [str(_PACKAGE_ROOT), *([str(megatron.resolve())] if megatron else [])]
    if inherited := os.environ.get("PYTHONPATH"):
        paths.append(inherited)
    return {**environment, "PYTHONPATH": os.pathsep.join(paths), **extra}


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    # what torchrun says about its ranks comes last, and hides what they said
    ends = [number for number, line in enumerate(lines) if "torch/distributed/elastic/" in line and number]
    end = ends[0] if ends else len(lines)
    return "\n".join(lines[max(0, end - TAIL_LINES) : end])
