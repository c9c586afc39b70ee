"""What a command may use of this machine, and of others: memory, processes, Dask."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_precision.errors import ConfigError

if TYPE_CHECKING:
    from mindspeed_precision.engines import Resources

DEFAULT_MEMORY = "2GiB"
"""What a command may use where nothing is said."""

_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_MOST = float(1 << 60)
_REMEDY = "a number with KiB, MiB, GiB or TiB, like 2GiB"


_FOLDED = (
    "runs that need more are read rank by rank, and of ranks that did the same one alone is looked "
    "at closely (docs/scale.md; default: %(default)s)"
)


def add_resources(command: argparse.ArgumentParser, *, memory: str = _FOLDED) -> None:
    """Add the options to a command.

    Args:
        command: its parser.
        memory: what becomes of runs that memory does not hold.
    """
    command.add_argument(
        "--memory",
        metavar="SIZE",
        default=DEFAULT_MEMORY,
        help=memory,
    )
    command.add_argument(
        "--jobs",
        metavar="N",
        help="processes that read such runs (default: one for each core)",
    )
    command.add_argument(
        "--dask",
        nargs="?",
        const="local",
        default="",
        metavar="ADDRESS",
        help="read such runs with Dask: a cluster of this machine, or the scheduler at tcp://HOST:PORT, "
        "whose workers must see the run directories",
    )


def say_if_large(runs: Sequence[str], why: str) -> None:
    """Say on stderr, before large runs are read, that every record is held, and about what that takes.

    Args:
        runs: directories; of a URL, and of what is no run of ours, nothing is known before it is read.
        why: every record is held.
    """
    from mindspeed_precision.fold.deciding import BYTES_PER_RECORD, PER_BYTE, index_bytes

    size = sum(index_bytes(Path(run)) for run in runs)
    memory = size * PER_BYTE
    if memory <= memory_of(DEFAULT_MEMORY):
        return
    records = f"about {size / BYTES_PER_RECORD / 1e6:.1f} million records"
    sys.stderr.write(f"mindspeed-precision: {why}: {records}, {memory / (1 << 30):.1f} GiB of memory\n")


def memory_of(text: str) -> int:
    """Return a size in bytes.

    Raises:
        ConfigError: it is none.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if found is None or found.group(2) not in _UNITS:
        raise ConfigError("no size of memory", where="--memory", found=repr(text), expected=_REMEDY)
    return int(min(float(found.group(1)), _MOST) * _UNITS[found.group(2)])


def jobs_of(text: str | None) -> int | None:
    """Return a number of processes; None for none.

    Raises:
        ConfigError: it is none.
    """
    if text is None:
        return None
    if re.fullmatch(r"0*[1-9][0-9]{0,8}", text) is None:
        expected = "a number of processes, at least 1"
        raise ConfigError("no number of processes", where="--jobs", found=repr(text), expected=expected)
    return int(text)


def resources_of(arguments: argparse.Namespace) -> Resources:
    """Return what the options allow.

    Raises:
        ConfigError: an option is no size, or no number.
    """
    from mindspeed_precision.engines import Resources

    return Resources(memory=memory_of(arguments.memory), jobs=jobs_of(arguments.jobs), dask=arguments.dask)
