"""Finding and reading the files of a dump: ``step*/rank*/{dump,construct,stack}.json``.

A dump may be damaged or hostile: no file beyond a size is read, no link is followed, nothing leaves the
directory that was given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mindspeed_precision.errors import DumpError

DUMP = "dump.json"
CONSTRUCT = "construct.json"
STACK = "stack.json"
DEBUG = "debug.json"
ELEMENTS = "dump_tensor_data"

WRITTEN_BY = "mindspeed-precision"
"""What ``written_by`` says in a dump that was exported from a run of ours: its moments are float64's."""

LARGEST_JSON = 2 << 30
"""Bytes of a JSON file that are read at the most: a step of a large model has some hundred megabytes."""

_STEP = re.compile(r"step(\d{1,9})")
_RANK = re.compile(r"rank(\d{1,6})")
_PROCESS = re.compile(r"proc(\d{1,9})")


@dataclass(frozen=True, kw_only=True)
class Place:
    """The directory of one rank in one step.

    Attributes:
        step: msprobe's, from 0.
        rank: of the process; 0 where msprobe knew none (``proc12345``).
        directory: where the files are.
    """

    step: int
    rank: int
    directory: Path


def looks_like_dump(path: Path) -> bool:
    """Tell whether a path is a dump of msprobe: its directory, a step or a rank of it, a ``dump.json``."""
    try:
        return next(_places(path), None) is not None
    except OSError:
        return False


def places(path: Path) -> list[Place]:
    """Return where each rank of each step is, by step and rank.

    Raises:
        DumpError: there is no dump, or two directories are of one rank.
    """
    try:
        found = sorted(_places(path), key=lambda place: (place.step, place.rank))
    except OSError as error:
        raise DumpError(f"cannot read: {error.strerror}", where=str(path)) from error
    if not found:
        expected = "step*/rank*/dump.json"
        raise DumpError("no dump of msprobe", where=str(path), found=_entries(path), expected=expected)
    for one, two in pairwise(found):
        if (one.step, one.rank) == (two.step, two.rank):
            names = f"{one.directory.name} and {two.directory.name}"
            raise DumpError(
                "two directories of one rank",
                where=str(one.directory.parent),
                found=names,
                expected="one process, or directories that are named after their ranks",
                remedy="start msprobe's debugger after torch.distributed is initialised",
            )
    return found


def _places(path: Path) -> Iterator[Place]:
    if path.name == DUMP and path.is_file():
        path = path.parent
    if (path / DUMP).is_file():
        step = _STEP.fullmatch(path.resolve().parent.name)
        yield Place(step=int(step.group(1)) if step else 0, rank=_rank(path) or 0, directory=path)
    elif path.is_dir():
        step = _STEP.fullmatch(path.resolve().name)
        steps = [(int(step.group(1)), path)] if step else list(_steps(path))
        for number, directory in steps:
            yield from _ranks(number, directory)


def _steps(path: Path) -> Iterator[tuple[int, Path]]:
    for entry in path.iterdir():
        found = _STEP.fullmatch(entry.name)
        if found and entry.is_dir() and not entry.is_symlink():
            yield int(found.group(1)), entry


def _ranks(step: int, path: Path) -> Iterator[Place]:
    for entry in path.iterdir():
        rank = _rank(entry)
        if rank is not None and not entry.is_symlink() and (entry / DUMP).is_file():
            yield Place(step=step, rank=rank, directory=entry)


def _rank(path: Path) -> int | None:
    found = _RANK.fullmatch(path.name)
    return int(found.group(1)) if found else 0 if _PROCESS.fullmatch(path.name) else None


def _entries(path: Path) -> str:
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError:
        return "no directory"
    return f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''}" if names else "an empty directory"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object as Python's ``json`` writes it: ``NaN`` and ``Infinity`` are numbers.

    Raises:
        DumpError: it is no file of this directory, too large, truncated, nested too deeply, or no object.
    """
    if path.is_symlink() or not path.is_file():
        raise DumpError("not a file", where=str(path), expected="a JSON file of msprobe, no link")
    try:
        size = path.stat().st_size
        if size > LARGEST_JSON:
            found, expected = f"{size} bytes", f"at most {LARGEST_JSON}"
            raise DumpError("too large to be read", where=str(path), found=found, expected=expected)
        plain = json.loads(path.read_bytes(), object_pairs_hook=_unique)
    except OSError as error:
        raise DumpError(f"cannot read: {error.strerror}", where=str(path)) from error
    except (ValueError, RecursionError) as error:
        text = " ".join(str(error).split())[:160]
        raise DumpError(f"not readable as JSON: {text}", where=str(path)) from error
    if not isinstance(plain, dict):
        raise DumpError("not a JSON object", where=str(path), found=type(plain).__name__)
    return plain


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = dict(pairs)
    if len(plain) != len(pairs):
        raise ValueError("a key appears twice")
    return plain
