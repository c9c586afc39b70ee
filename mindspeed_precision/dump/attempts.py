"""Where an attempt at a training writes: the run directory, or ``restartNN`` in it, so that nothing is mixed.

A restart is continued where the user asks for it (setting ``restart``), and where the launch restarts by
itself: torchrun after a failure (``--max-restarts``), or a wrapper that calls the training again in this
process. A run that anybody else left there is refused.
"""

from __future__ import annotations

import datetime
import os
import re
from pathlib import Path

from mindspeed_precision.config import CONTINUE
from mindspeed_precision.dump.format import MANIFEST, rank_directory
from mindspeed_precision.dump.inside import read_inside
from mindspeed_precision.dump.strict_json import load_object
from mindspeed_precision.errors import DumpError
from mindspeed_precision.permissions import make_directory

_NAME = re.compile(r"restart(\d{2,})")
_COUNT = "TORCHELASTIC_RESTART_COUNT"

_begun: set[Path] = set()
"""Runs of which an attempt of this process has not ended well."""


def attempt_directories(run: Path) -> list[Path]:
    """Return the directories of a run's restarts, in order; those too that a stale listing does not show."""
    matches = (_NAME.fullmatch(entry.name) for entry in run.iterdir())  # thousands of ranks are not asked for
    numbers = {int(match.group(1)) for match in matches if match and (run / match.group()).is_dir()}
    behind = 1 + max(numbers, default=0)
    while (run / _name(behind)).is_dir():
        behind += 1
    return [run / _name(number) for number in range(1, behind) if (run / _name(number)).is_dir()]


def _name(number: int) -> str:
    return f"restart{number:02d}"


def begin_attempt(run: Path, restart: str) -> Path:
    """Return the directory into which this attempt writes; it is there, and empty.

    On the first rank, before any rank writes.

    Args:
        run: the run directory that the user named.
        restart: the setting.

    Raises:
        DumpError: something is there, and this is no restart of it; or the directory cannot be made.
    """
    try:
        make_directory(run, exist_ok=True)
        occupied = _occupied(run)
        if occupied:
            _require_restart(run, restart, occupied)
            last = attempt_directories(run)[-1:]
            directory = run / _name(1 + int(last[0].name.removeprefix("restart")) if last else 1)
            make_directory(directory)
        else:
            directory = run
    except OSError as error:
        raise DumpError(f"cannot make this run directory: {error.strerror}", where=str(run)) from error
    _begun.add(run.resolve())
    return directory


def end_attempt(run: Path) -> None:
    """Note that training ended well: what this process begins there later is no restart."""
    _begun.discard(run.resolve())


def _occupied(run: Path) -> str:
    """Return what is in a directory already, also where its listing is stale; nothing where it is empty."""
    listed = (entry.name for entry in run.iterdir() if entry.suffix != ".part")
    return next((name for name in listed if not _of_the_system(name)), "") or next(
        (name for name in (MANIFEST, rank_directory(0)) if (run / name).exists()), ""
    )


def _of_the_system(name: str) -> bool:
    """Tell whether it is nobody's result: hidden (``.nfs0001``, ``.DS_Store``), or ``lost+found``."""
    return name.startswith(".") or name == "lost+found"


def _require_restart(run: Path, restart: str, occupied: str) -> None:
    is_run = (run / MANIFEST).is_file()
    if is_run and (restart == CONTINUE or run.resolve() in _begun or _launch_restarted(run)):
        return
    raise DumpError(
        "the run directory is not empty, and nothing is overwritten",
        where=str(run),
        found=occupied,
        expected="an empty or new directory",
        remedy="give another one with --precision-debug-out"
        + (", or go on in it with restart=continue" if is_run else ""),
    )


def _launch_restarted(run: Path) -> bool:
    """Tell whether torchrun has started these processes again, and ``run`` was made since it began."""
    if os.environ.get(_COUNT, "0") in ("", "0"):
        return False
    began = _began_at(_launcher())
    path = run / MANIFEST
    created = load_object(read_inside(path, run), where=str(path)).get("created")
    try:
        return began is not None and datetime.datetime.fromisoformat(str(created)).timestamp() >= int(began)
    except ValueError:
        return False


def _launcher() -> int:
    """Return the nearest process above this one that torchrun has not started: torchrun."""
    process = os.getppid()
    while process > 1 and f"{_COUNT}=".encode() in _read(process, "environ"):
        process = int(_after_name(process)[1])
    return process


def _began_at(process: int) -> float | None:
    """Return when a process began, in seconds since the epoch; None where the system does not tell."""
    status, system = _after_name(process), Path("/proc/stat")
    boot = re.search(r"^btime (\d+)", system.read_text() if system.is_file() else "", re.MULTILINE)
    if boot is None or len(status) <= 19:
        return None
    return int(boot.group(1)) + int(status[19]) / os.sysconf("SC_CLK_TCK")


def _after_name(process: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` behind the name; two where there is none."""
    return _read(process, "stat").rpartition(b")")[2].decode().split() or ["", "1"]


def _read(process: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{process}/{name}").read_bytes()
    except OSError:
        return b""
