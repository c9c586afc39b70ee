"""Runs that lie on an object store or behind any URL that fsspec reads: kept as a local copy, made as needed.

Everything after this module sees a directory. What is small is copied when a run is opened; files of elements
are copied when one of them is asked for, also by another process. What changed there is copied again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_precision.errors import DumpError

CACHE = "MSP_CACHE"
"""Environment variable: where copies are kept (``~/.cache/mindspeed_precision``)."""

_URL = re.compile(r"[a-z][a-z0-9+.-]+(::|://)", re.IGNORECASE)
_LATER = (".safetensors",)
_STAMPS = ("size", "ETag", "etag", "LastModified", "mtime", "modified", "created")
"""What file systems say of a file that changes when its content does."""


def is_url(source: str | Path) -> bool:
    """Tell whether a run is named by a URL (``s3://bucket/run``) and not by a path."""
    return isinstance(source, str) and _URL.match(source) is not None


def local_directory(source: str | Path) -> Path:
    """Return the directory of a run: of a path itself, of a URL its copy, brought up to date.

    Args:
        source: a path, or a URL of a protocol that fsspec knows.

    Raises:
        DumpError: fsspec or what it needs for the protocol is absent, nothing is there, it cannot be read, or
            it holds a name that leads out of the run.
    """
    if isinstance(source, Path) or not is_url(source):
        return Path(source)
    copy = _Copy.of(source)
    copy.update()
    return copy.directory


def beside(source: str | Path) -> Path:
    """Return where an answer about a run is put: where the run lies, of a URL where the user works."""
    return Path.cwd() if is_url(source) else Path(source).absolute().parent


def bring(path: Path) -> None:
    """Copy a file of a run that lies elsewhere, if it was left there so far; of any other run do nothing.

    Args:
        path: of the file, inside a directory that ``local_directory`` returned.

    Raises:
        DumpError: it cannot be read.
    """
    if copies() not in path.parents or path.exists():
        return
    place, directory, *parts = path.relative_to(copies()).parts
    record = _record(copies() / place)
    if not record.is_file():
        return
    known = json.loads(record.read_text(encoding="utf-8"))
    name = "/".join(parts)
    if name in known["files"]:
        _Copy(url=known["url"], directory=copies() / place / directory).fetch([name])


def copies() -> Path:
    """Return the directory in which copies are kept, each in one of its own."""
    given = os.environ.get(CACHE)
    return (Path(given) if given else Path.home() / ".cache" / "mindspeed_precision").absolute() / "runs"


def shown(url: str) -> str:
    """Return a URL without a user's name and password."""
    return re.sub(r"//[^/@]*@", "//", url)


def _record(place: Path) -> Path:
    return place.with_suffix(".json")


@dataclass(frozen=True)
class _Copy:
    url: str
    directory: Path

    @classmethod
    def of(cls, url: str) -> _Copy:
        place = copies() / hashlib.blake2b(url.encode(), digest_size=12).hexdigest()
        name = re.sub(r"[^\w.-]", "_", shown(url).rstrip("/").rpartition("/")[2]).strip(".")
        return cls(url=url, directory=place / (name or "run"))

    def update(self) -> None:
        files = self._listing()
        record = _record(self.directory.parent)
        before = json.loads(record.read_text(encoding="utf-8"))["files"] if record.is_file() else {}
        here = {
            path.relative_to(self.directory).as_posix()
            for path in self.directory.rglob("*")
            if path.is_file()
        }
        for name in here:
            if name not in files or files[name] != before.get(name):
                (self.directory / name).unlink()
                here = here - {name}
        self.directory.mkdir(parents=True, exist_ok=True)
        self.fetch([name for name in files if name not in here and not name.endswith(_LATER)])
        for name in files:  # a rank whose only files come later has its directory
            (self.directory / name).parent.mkdir(parents=True, exist_ok=True)
        _write(record, {"url": self.url, "files": files})

    def fetch(self, names: list[str]) -> None:
        """Copy files, each there whole or not at all."""
        if not names:
            return
        system, root = self._open()
        targets = [self.directory / name for name in names]
        for target in targets:
            target.parent.mkdir(parents=True, exist_ok=True)
        parts = [target.with_name(f"{target.name}.{os.getpid()}.part") for target in targets]
        try:
            system.get([f"{root}/{name}" for name in names], [str(part) for part in parts])
            for part, target in zip(parts, targets, strict=True):
                part.replace(target)
        except Exception as error:
            raise self._unreadable(error) from error
        finally:
            for part in parts:
                part.unlink(missing_ok=True)

    def _listing(self) -> dict[str, str]:
        system, root = self._open()
        try:
            found: Mapping[str, Mapping[str, Any]] = system.find(root, detail=True)
        except Exception as error:
            raise self._unreadable(error) from error
        files = {path.removeprefix(root).lstrip("/"): _stamp(entry) for path, entry in found.items()}
        files.pop("", None)  # some stores hold an object of a directory's own name
        if not files:
            raise DumpError("no such run directory", where=shown(self.url))
        for name in files:
            if any(part in ("", ".", "..") for part in name.split("/")) or "\\" in name or "\0" in name:
                raise DumpError("a name that leads out of the run", where=shown(self.url), found=repr(name))
        return files

    def _open(self) -> tuple[Any, str]:
        """Return the file system and the run's name in it."""
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            remedy = "pip install 'mindspeed-precision[remote]'"
            raise DumpError(
                "runs behind a URL are read with fsspec", where=shown(self.url), remedy=remedy
            ) from error
        try:
            system, root = url_to_fs(self.url)
        except ImportError as error:
            raise DumpError("a library is absent", where=shown(self.url), found=str(error)) from error
        except ValueError as error:
            expected = "a path, or a URL that fsspec reads (s3://, hdfs://, gs://, https://)"
            raise DumpError(str(error), where=shown(self.url), expected=expected) from error
        except Exception as error:
            raise self._unreadable(error) from error
        if not root.strip("/"):
            raise DumpError("no name of a run", where=shown(self.url), expected="a directory in the store")
        system.invalidate_cache()
        return system, root.rstrip("/")

    def _unreadable(self, error: Exception) -> DumpError:
        said = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, FileNotFoundError):
            return DumpError("no such run directory", where=shown(self.url))
        remedy = "check the address, the credentials and the network"
        return DumpError("cannot read", where=shown(self.url), found=said[:300], remedy=remedy)


def _stamp(entry: Mapping[str, Any]) -> str:
    return " ".join(str(entry[key]) for key in _STAMPS if key in entry)


def _write(record: Path, content: dict[str, Any]) -> None:
    part = record.with_name(f"{record.name}.{os.getpid()}.part")
    part.write_text(json.dumps(content), encoding="utf-8")
    part.chmod(0o600)  # the URL may have a password
    part.replace(record)
