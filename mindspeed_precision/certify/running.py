"""Run what a certificate is made from, one after the other, each with its own log."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mindspeed_precision.certify.certificate import Certificate, certify_runs
from mindspeed_precision.certify.launching import Launching, PlannedRun
from mindspeed_precision.errors import ConfigError, ExternalCommandError
from mindspeed_precision.permissions import make_directory, open_new

_TAIL = 20


def certify_launch(
    words: Sequence[str],
    *,
    out: str | Path,
    steps: int | None = None,
    resume_at: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Certificate:
    """Run a launch twice, or whole and in two parts with a checkpoint between them, and certify it.

    Args:
        words: the launch; a training that takes ``--precision-debug``.
        out: a new directory for runs, logs and checkpoints.
        steps: how many steps a run makes; None: as the launch says, or twice ``resume_at``.
        resume_at: step at which the second part goes on.
        environment: with which it is started; None: this process's.

    Raises:
        ConfigError: the launch cannot be read or added to, or the directory is not empty.
        ExternalCommandError: a run failed.
        DumpError: a run recorded nothing.
    """
    directory = Path(out).absolute()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError("not an empty directory", where=str(out), remedy="give a new one with --out")
    launching = Launching(
        words, out=directory, environment=dict(os.environ if environment is None else environment)
    )
    planned = launching.twice(steps) if resume_at is None else launching.resumed(resume_at, steps)
    make_directory(directory, exist_ok=True)
    for number, run in enumerate(planned, start=1):
        sys.stderr.write(
            f"certify: run {number} of {len(planned)} ({run.name}), log {directory / run.name}.log\n"
        )
        _start(run, directory / f"{run.name}.log")
    return certify_runs(*(run.out for run in planned), launch=planned[0].words)


def _start(run: PlannedRun, log: Path) -> None:
    with open_new(log, "wb") as stream:
        try:
            ended = subprocess.run(
                run.words, env=dict(run.environment), stdout=stream, stderr=subprocess.STDOUT, check=False
            )
        except OSError as error:
            raise ExternalCommandError(
                "the launch could not be started", where=run.words[0], found=str(error.strerror)
            ) from error
    if ended.returncode:
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:]
        raise ExternalCommandError(
            f"the {run.name} run failed; its last lines were:\n" + "\n".join(last) + "\n",
            where=run.words[0],
            found=f"exit status {ended.returncode}",
            expected="exit status 0",
            remedy=f"read {log}; it must import pretrain from mindspeed_precision to take the flags",
        )
    if not (run.out / "run.json").is_file():
        raise ExternalCommandError(
            f"the {run.name} run recorded nothing",
            where=str(run.out),
            expected="run.json",
            remedy="the training script must import pretrain from mindspeed_precision",
        )


__all__ = ["certify_launch"]
