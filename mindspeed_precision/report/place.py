"""Where a report may be written: asked before anything is compared, which can take minutes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mindspeed_precision.dump.format import MANIFEST
from mindspeed_precision.errors import ConfigError

_REMEDY = "name a directory beside the runs"


def require_report_place(directory: Path, runs: Sequence[str | Path], *, where: str = "--out") -> None:
    """Refuse a directory that cannot be written, or that is a run or inside one; make nothing.

    Args:
        directory: where the report goes.
        runs: directories that are compared: runs, or dumps of another tool.
        where: the argument, for the message.

    Raises:
        ConfigError: it is none for a report.
    """
    place = Path(os.path.realpath(directory))
    around = [place, *place.parents]
    given = {Path(os.path.realpath(run)) for run in runs}
    run = next((one for one in around if (one in given and one.is_dir()) or (one / MANIFEST).is_file()), None)
    if run is not None:
        raise ConfigError(
            "a report is not written into a run",
            where=where,
            found=f"{directory}, which is {'' if run == place else 'inside '}the run {run}",
            remedy=_REMEDY,
        )
    there = next(one for one in around if os.path.lexists(one))
    if not there.is_dir():
        raise ConfigError("not a directory", where=where, found=str(there), remedy=_REMEDY)
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError("the directory cannot be written", where=where, found=str(there), remedy=_REMEDY)
