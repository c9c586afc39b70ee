"""Runs that lie on an object store or behind any URL that fsspec reads: kept as a local copy, made as needed.

Everything after this module sees a directory. What is small is copied when a run is opened; files of elements
are copied when one of them is asked for, also by another process. What changed there is copied again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mindspeed_precision.errors import DumpError

CACHE = "MSP_CACHE"
"""Environment variable: where copies are kept (``~/.cache/mindspeed_precision``)."""

_PROTOCOL = r"[a-z][a-z0-9+.-]+"
_URL = re.compile(rf"({_PROTOCOL}::)*{_PROTOCOL}://", re.IGNORECASE)
"""``protocol://…``, also behind protocols that it is read through (``simplecache::s3://…``)."""
_LATER = (".safetensors",)
_STAMPS = (
    *("ETag", "etag", "LastModified", "last_modified", "mtime", "modified", "modificationTime"),
    *("modify", "updated", "created"),
)
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
    if not _record(copies() / place).is_file():
        return
    with _alone(copies() / place):  # another process may be bringing the copy up to date
        known = _known(copies() / place)
        name = "/".join(parts)
        if name in known["files"] and not path.exists():
            _Copy(url=known["url"], directory=copies() / place / directory).fetch([name])


def copies() -> Path:
    """Return the directory in which copies are kept, each in one of its own."""
    given = os.environ.get(CACHE)
    return (Path(given) if given else Path.home() / ".cache" / "mindspeed_precision").absolute() / "runs"


def shown(url: str) -> str:
    """Return a URL, or a text that has some, without users' names, passwords and queries, which may sign."""
    return re.sub(r"\?[^\s'\"]*", "", re.sub(r"//[^/@\s]*@", "//", url))


def _record(place: Path) -> Path:
    return place.with_suffix(".json")


def _known(place: Path) -> dict[str, Any]:
    """Return what is noted of a copy; of a damaged note nothing, so that all is copied again."""
    with suppress(OSError, ValueError):
        found = json.loads(_record(place).read_text(encoding="utf-8"))
        if isinstance(found, dict) and isinstance(found.get("files"), dict) and "url" in found:
            return found
    return {"url": "", "files": {}}


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Change a copy while no other process does.

    Raises:
        DumpError: copies cannot be kept.
    """
    try:
        copies().mkdir(parents=True, exist_ok=True, mode=0o700)  # what is copied may not be for everybody
        with place.with_suffix(".lock").open("w") as lock:
            with suppress(ImportError, OSError):  # a system or a disk without locks
                import fcntl

                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        remedy = f"set {CACHE} to a directory that can be written"
        found = error.strerror or type(error).__name__
        raise DumpError(
            "copies cannot be kept here", where=str(copies()), found=found, remedy=remedy
        ) from error


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
        with _alone(self.directory.parent):
            self._update(files)

    def _update(self, files: dict[str, str]) -> None:
        place = self.directory.parent
        before = _known(place)["files"]
        here = {
            path.relative_to(self.directory).as_posix()
            for path in self.directory.rglob("*")
            if path.is_file()
        }
        same = {
            name: files[name]
            for name in here & files.keys()
            if files[name] and files[name] == before.get(name)
        }
        self.directory.mkdir(parents=True, exist_ok=True)
        _write(_record(place), {"url": self.url, "files": same})  # true, wherever what follows is interrupted
        for name in here - same.keys():
            (self.directory / name).unlink()
        for path in sorted(
            self.directory.rglob("*"), reverse=True
        ):  # a restart that is gone has no directory
            with suppress(OSError):
                path.rmdir()
        self.fetch([name for name in files if name not in same and not name.endswith(_LATER)])
        for name in files:  # a rank whose only files come later has its directory
            (self.directory / name).parent.mkdir(parents=True, exist_ok=True)
        _write(_record(place), {"url": self.url, "files": files})

    def fetch(self, names: list[str]) -> None:
        """Copy files, each there whole or not at all."""
        if not names:
            return
        system, root = self._open()
        with tempfile.TemporaryDirectory(dir=self.directory.parent, ignore_cleanup_errors=True) as parts:
            came = [Path(parts) / str(number) for number in range(len(names))]
            try:
                system.get([f"{root}/{name}" for name in names], [str(part) for part in came])
            except Exception as error:
                raise self._unreadable(error) from error
            for part, name in zip(came, names, strict=True):
                target = self.directory / name
                target.parent.mkdir(parents=True, exist_ok=True)
                part.replace(target)

    def _listing(self) -> dict[str, str]:
        system, root = self._open()
        try:
            found: Mapping[str, Mapping[str, Any]] = system.find(root, detail=True)
        except Exception as error:
            raise self._unreadable(error) from error
        entries = {path.removeprefix(root).lstrip("/"): entry for path, entry in found.items()}
        around = {"", *(f"{one}" for name in entries for one in PurePosixPath(name).parents)}
        files = {  # some stores hold an empty object of a directory's own name
            name: _stamp(entry)
            for name, entry in entries.items()
            if name and not (entry.get("size") == 0 and (name in around or name.endswith("/")))
        }
        if not files:
            raise DumpError("no such run directory", where=shown(self.url))
        for name in files:
            if any(part in ("", ".", "..") for part in name.split("/")) or "\\" in name or "\0" in name:
                raise DumpError("a name that leads out of the run", where=shown(self.url), found=repr(name))
            if name in around:
                raise DumpError("a file and a directory of one name", where=shown(self.url), found=repr(name))
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
            raise DumpError("a library is absent", where=shown(self.url), found=shown(str(error))) from error
        except ValueError as error:
            expected = "a path, or a URL that fsspec reads (s3://, hdfs://, gs://, https://)"
            raise DumpError(shown(str(error)), where=shown(self.url), expected=expected) from error
        except Exception as error:
            raise self._unreadable(error) from error
        if not root.strip("/"):
            raise DumpError("no name of a run", where=shown(self.url), expected="a directory in the store")
        system.invalidate_cache()
        return system, root.rstrip("/")

    def _unreadable(self, error: Exception) -> DumpError:
        said = " ".join(shown(str(error)).split()) or type(error).__name__
        if isinstance(error, FileNotFoundError):
            return DumpError("no such run directory", where=shown(self.url))
        remedy = "check the address, the credentials and the network"
        return DumpError("cannot read", where=shown(self.url), found=said[:300], remedy=remedy)


def _stamp(entry: Mapping[str, Any]) -> str:
    """Return what changes with a file; empty where the store says nothing of it, as web servers do."""
    stamps = [str(entry[key]) for key in _STAMPS if entry.get(key)]
    return " ".join([str(entry.get("size")), *stamps]) if stamps else ""


def _write(record: Path, content: dict[str, Any]) -> None:
    part = record.with_name(f"{record.name}.{os.getpid()}.part")
    part.write_text(json.dumps(content), encoding="utf-8")
    part.chmod(0o600)  # the URL may have a password
    part.replace(record)
