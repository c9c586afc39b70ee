"""Writing a run so that whatever was whole before a crash stays readable after it."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump.format import (
    COMPLETE,
    DIGEST_ALGORITHM,
    FINDINGS,
    INDEX,
    MANIFEST,
    SCHEMA,
    Header,
    Line,
    Parameters,
    PlaceDeclaration,
    Problem,
    StepMarker,
    payload_file,
    rank_directory,
    to_json,
)
from mindspeed_precision.dump.payload import write_payload
from mindspeed_precision.dump.strict_json import load_object
from mindspeed_precision.errors import DumpError
from mindspeed_precision.records import ParameterDeclaration, Place, RankCoordinates, TensorRecord


def create_run(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Create a run directory with its manifest; on one rank, before any rank writes into it.

    Args:
        directory: must not exist or be empty, so that no earlier run is lost.
        manifest: the content of ``run.json``; its ``schema`` is set here.

    Raises:
        DumpError: the directory holds something, or cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        occupied = next(directory.iterdir(), None)
    except OSError as error:
        raise DumpError(f"cannot make this run directory: {error.strerror}", where=str(directory)) from error
    if occupied is not None:
        raise DumpError(
            "the run directory is not empty, and nothing is overwritten",
            where=str(directory),
            found=occupied.name,
            expected="an empty or new directory",
            remedy="give another one with --precision-debug-out",
        )
    _write_manifest(directory, {**manifest, "schema": SCHEMA})


def update_manifest(directory: Path, changes: Mapping[str, Any]) -> None:
    """Replace top-level keys of ``run.json``, in one rename.

    Raises:
        DumpError: there is no readable manifest, or it cannot be written.
    """
    path = directory / MANIFEST
    try:
        plain = load_object(path.read_bytes(), where=str(path))
    except OSError as error:
        raise DumpError(f"no manifest to update: {error.strerror}", where=str(path)) from error
    _write_manifest(directory, {**plain, **changes, "schema": SCHEMA})


def _write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    path = directory / MANIFEST
    try:
        text = json.dumps(_without_infinities(manifest), allow_nan=False, indent=1)
        _write_and_rename(path, text.encode() + b"\n")
    except (TypeError, ValueError) as error:
        raise DumpError(f"the manifest cannot be written as JSON: {error}", where=str(path)) from error
    except OSError as error:
        raise DumpError(f"cannot write the manifest: {error.strerror}", where=str(path)) from error


def _without_infinities(value: Any) -> Any:
    """JSON has no NaN and no infinities; a configuration may."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _without_infinities(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinities(item) for item in value]
    return value


def _write_and_rename(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".part")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class RankWriter:
    """Appends one rank's records; whole steps reach the disk before ``write_step`` returns.

    Args:
        directory: the run directory.
        coordinates: where this rank sits.

    Raises:
        DumpError: this rank has already written there, or the disk refuses; also from every method.
    """

    def __init__(self, directory: Path, *, coordinates: RankCoordinates) -> None:
        self.directory = directory / rank_directory(coordinates.rank)
        self._path = self.directory / INDEX
        self._digest = hashlib.blake2b(digest_size=16)
        self._lines = 0
        self._broken = False
        self._places: dict[Place, int] = {}
        try:
            self.directory.mkdir(parents=True)
            self._file = self._path.open("xb", buffering=0)
        except FileExistsError as error:
            where, remedy = str(self.directory), "give another one with --precision-debug-out"
            raise DumpError(
                "this rank has already written into this run", where=where, remedy=remedy
            ) from error
        except OSError as error:
            raise DumpError(f"cannot write: {error.strerror}", where=str(self.directory)) from error
        self._append([Header(coordinates=coordinates)])

    def declare_parameters(self, names: Sequence[ParameterDeclaration]) -> None:
        """Write which parameters this rank holds."""
        self._append([Parameters(parameters=tuple(names))])

    def write_step(
        self,
        step: int,
        records: Sequence[TensorRecord],
        payloads: Mapping[int, HostTensor],
        *,
        microbatches: int,
        problems: Sequence[Problem] = (),
    ) -> None:
        """Write a step: payload files, then its lines, then its marker; all on the disk when it returns.

        Args:
            step: the step.
            records: its records in execution order; ``payload`` is filled in here.
            payloads: elements by ``seq``, for the records that have some. Read once, file by file.
            microbatches: how many the step ran.
            problems: records that could not be taken.
        """
        if self._broken:
            raise self._refusal()
        self._broken = True  # until this step is whole: after a torn line nothing may follow
        files = self._write_payloads(step, records, payloads)
        named = [replace(r, payload=files[r.seq]) if r.seq in files else r for r in records]
        marker = StepMarker(
            step=step,
            records=len(named),
            payloads=len(files),
            problems=len(problems),
            microbatches=microbatches,
        )
        self._append([*self._new_places(named), *named, *problems, marker])
        self._broken = False

    def _new_places(self, records: Sequence[TensorRecord]) -> list[Line]:
        """Number the places that no record had before."""
        fresh: list[Line] = []
        for place in dict.fromkeys(record.place for record in records):
            if place is not None and place not in self._places:
                fresh.append(PlaceDeclaration(number=len(self._places), place=place))
                self._places[place] = len(self._places)
        return fresh

    def write_findings(self, findings: Sequence[Mapping[str, Any]]) -> None:
        """Write what was found on this rank while it ran, in place of what was written before."""
        plain = {"schema": SCHEMA, "findings": _without_infinities(findings)}
        try:
            _write_and_rename(self.directory / FINDINGS, json.dumps(plain, indent=1).encode() + b"\n")
        except OSError as error:
            raise DumpError(f"cannot write: {error.strerror}", where=str(self.directory)) from error

    def close(self, *, complete: bool) -> None:
        """Close the index; ``complete`` says that the run ended as planned, and seals it."""
        if self._file.closed:
            return
        self._file.close()
        if complete and self._broken:
            raise self._refusal()
        if complete:
            seal = {"schema": SCHEMA, "lines": self._lines, "algorithm": DIGEST_ALGORITHM}
            seal["digest"] = self._digest.hexdigest()
            try:
                _write_and_rename(self.directory / COMPLETE, json.dumps(seal).encode() + b"\n")
            except OSError as error:
                raise DumpError(f"cannot write: {error.strerror}", where=str(self.directory)) from error

    def _refusal(self) -> DumpError:
        return DumpError(
            "an earlier step could not be written, so nothing may follow it",
            where=str(self._path),
            remedy="the steps before it are readable; free the disk and run again",
        )

    def _write_payloads(
        self, step: int, records: Sequence[TensorRecord], payloads: Mapping[int, HostTensor]
    ) -> dict[int, str]:
        groups: dict[int, list[int]] = {}
        for record in records:
            if record.seq in payloads:
                groups.setdefault(record.key.microbatch, []).append(record.seq)
        files = {}
        for microbatch, members in groups.items():
            name = self._unused_name(step, microbatch)
            try:
                write_payload(self.directory / name, {str(seq): payloads[seq] for seq in members})
            except OSError as error:
                raise DumpError(
                    f"cannot write: {error.strerror}", where=str(self.directory / name)
                ) from error
            files.update(dict.fromkeys(members, name))
        return files

    def _unused_name(self, step: int, microbatch: int) -> str:
        repeat = 0
        while (self.directory / payload_file(step, microbatch, repeat)).exists():
            repeat += 1  # the framework ran this step again: keep both
        return payload_file(step, microbatch, repeat)

    def _place(self, line: Line) -> int | None:
        if not isinstance(line, TensorRecord) or line.place is None:
            return None
        return self._places[line.place]

    def _append(self, lines: Iterable[Line]) -> None:
        texts = [to_json(line, place=self._place(line)) for line in lines]
        data = "".join(f"{text}\n" for text in texts).encode()
        try:
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) or 0 :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise DumpError(f"cannot write: {error.strerror}", where=str(self._path)) from error
        self._digest.update(data)
        self._lines += len(texts)
