"""Runs that were written, with other bits in some records, sealed again."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Wanted = Callable[[dict[str, Any]], bool]


def of(**wanted: Any) -> Wanted:
    """Return a test of a record's line: every key has the value, or one that a function accepts."""
    return lambda plain: all(
        value(plain[name]) if callable(value) else plain[name] == value for name, value in wanted.items()
    )


def copied(run: Path, target: Path, *changes: tuple[Sequence[int] | None, Wanted]) -> Path:
    """Copy a run, and change the fingerprints of some records of some ranks (None: of all)."""
    shutil.copytree(run, target)
    for ranks, wanted in changes:
        for directory in sorted(target.glob("rank*")):
            if ranks is None or int(directory.name[4:]) in ranks:
                assert rewritten(directory, lambda line, wanted=wanted: _changed(line, wanted))
    return target


def _changed(line: bytes, wanted: Wanted) -> bytes:
    if not line.startswith(b'{"kind":"record"') or not wanted(json.loads(line)):
        return line
    return re.sub(rb'(?<="fingerprint":")(.)', lambda m: b"0" if m[1] != b"0" else b"1", line, count=1)


def rewritten(directory: Path, change: Callable[[bytes], bytes]) -> bool:
    """Change the lines of a rank's index, and seal it; tell whether any was changed."""
    index, seal = directory / "index.jsonl", directory / "COMPLETE"
    before = index.read_bytes()
    data = b"\n".join(map(change, before.split(b"\n")))
    index.write_bytes(data)
    plain = json.loads(seal.read_text())
    plain |= {"lines": data.count(b"\n"), "digest": hashlib.blake2b(data, digest_size=16).hexdigest()}
    seal.write_text(json.dumps(plain) + "\n")
    return data != before


def without_seal(run: Path, rank: int) -> Path:
    (run / f"rank{rank:05d}" / "COMPLETE").unlink()
    return run


def cut_off(run: Path, rank: int) -> Path:
    """Leave of a rank what a crash in its last step leaves."""
    index = without_seal(run, rank) / f"rank{rank:05d}" / "index.jsonl"
    index.write_bytes(index.read_bytes()[:-4000])
    return run


def without(directory: Path, wanted: Wanted) -> None:
    """Take some records out of a rank, as a run that did not record them has none."""
    numbers = iter(range(1 << 30))
    count = 0

    def change(line: bytes) -> bytes | None:
        nonlocal count
        if line.startswith(b'{"kind":"record"'):
            if wanted(json.loads(line)):
                return None
            count += 1
            return re.sub(rb'(?<="seq":)\d+', b"%d" % next(numbers), line, count=1)
        if line.startswith(b'{"kind":"step"'):
            counted, count = count, 0
            return re.sub(rb'(?<="records":)\d+', b"%d" % counted, line)
        return line

    index = directory / "index.jsonl"
    kept = [found for line in index.read_bytes().split(b"\n") if (found := change(line)) is not None]
    index.write_bytes(b"\n".join(kept))
    rewritten(directory, lambda line: line)
