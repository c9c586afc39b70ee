"""A run from a path, whoever recorded it: this package, or msprobe."""

from __future__ import annotations

from pathlib import Path

from mindspeed_precision.dump import reader
from mindspeed_precision.dump.format import MANIFEST
from mindspeed_precision.dump.object_store import local_directory
from mindspeed_precision.dump.reader import Run, Wanted


def load_run(directory: str | Path, *, wanted: Wanted | None = None) -> Run:
    """Read a run directory, or a dump of msprobe as a run.

    A crashed run is read up to its last whole step, and ``notes`` say so. Of a dump ``notes`` say what it
    lacks.

    Args:
        directory: of a run; or what msprobe calls ``dump_path``, a step or a rank of it, or a ``dump.json``;
            or a URL of one (``s3://bucket/run``).
        wanted: which records are kept (``dump.reader.load_run``); None: all.

    Raises:
        DumpError: no such directory, neither of the two, another schema, nothing in it that can be read, or a
            file whose content is not what was written.
    """
    path = local_directory(directory)
    if not (path / MANIFEST).is_file():
        from mindspeed_precision.msprobe.files import looks_like_dump

        if looks_like_dump(path):
            from mindspeed_precision.msprobe.reader import load_dump

            return reader.thinned(load_dump(path), wanted)
    return reader.load_run(path, wanted=wanted)
