"""Writing a run so that whatever was whole before a crash stays readable after it."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.config import REFUSE
from mindspeed_precision.dump.attempts import begin_attempt, end_attempt
from mindspeed_precision.dump.background import Background, Immediately, Jobs
from mindspeed_precision.dump.encode import RecordLine
from mindspeed_precision.dump.format import (
    COMPLETE,
    DIGEST_ALGORITHM,
    EFFECTIVE,
    FINDINGS,
    INDEX,
    MANIFEST,
    SCHEMA,
    Header,
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
from mindspeed_precision.dump.whole_file import whole_file
from mindspeed_precision.errors import DumpError
from mindspeed_precision.permissions import make_directory, open_new
from mindspeed_precision.records import ParameterDeclaration, Place, RankCoordinates, TensorRecord
from mindspeed_precision.redaction import redact


def create_run(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Create a run directory with its manifest; on one rank, before any rank writes into it.

    Args:
        directory: must not exist or be empty, so that no earlier run is lost.
        manifest: the content of ``run.json``; its ``schema`` is set here, and secrets are taken out.

    Raises:
        DumpError: the directory holds something, or cannot be written.
    """
    begin_attempt(directory, REFUSE)
    end_attempt(directory)  # a caller of this function restarts nothing
    write_manifest(directory, manifest)


def write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Write ``run.json`` into the directory of an attempt; its ``schema`` is set here, secrets are taken out.

    Raises:
        DumpError: it cannot be written, or another launch began there at the same time.
    """
    _write_manifest(directory, {**manifest, "schema": SCHEMA}, first=True)


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


def _write_manifest(directory: Path, manifest: Mapping[str, Any], *, first: bool = False) -> None:
    path = directory / MANIFEST
    try:
        text = json.dumps(redact(_without_infinities(manifest)), allow_nan=False, indent=1)
        _write_and_rename(path, text.encode() + b"\n", first=first)
    except (TypeError, ValueError) as error:
        raise DumpError(f"the manifest cannot be written as JSON: {error}", where=str(path)) from error
    except FileExistsError as error:
        remedy = "give each launch a directory of its own with --precision-debug-out"
        raise DumpError("another launch began in this directory", where=str(path), remedy=remedy) from error
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


def _write_and_rename(path: Path, data: bytes, *, first: bool = False) -> None:
    with whole_file(path, first=first) as file:
        file.write(data)


class RankWriter:
    """Appends one rank's records, whole steps at a time.

    Args:
        directory: the run directory.
        coordinates: where this rank sits.
        queue: bytes that may wait in memory while another thread writes steps; 0: a step is on the disk when
            ``write_step`` returns.

    Attributes:
        records: how many were handed over.
        index_bytes: of the lines that were handed over.
        payload_bytes: of the elements that were.

    Raises:
        DumpError: this rank has already written there, or the disk refuses; also from every method, and of a
            step that waited in the queue from the method that is called next.
    """

    def __init__(self, directory: Path, *, coordinates: RankCoordinates, queue: int = 0) -> None:
        self.directory = directory / rank_directory(coordinates.rank)
        self._path = self.directory / INDEX
        self._digest = hashlib.blake2b(digest_size=16)
        self._lines = 0
        self._broken = False
        self._places: dict[Place, int] = {}
        self._jobs: Jobs = Background(queue) if queue else Immediately()
        self._coming: set[str] = set()
        self.records = self.index_bytes = self.payload_bytes = 0
        try:
            make_directory(self.directory)
            self._file = open_new(self._path, "xb", buffering=0)
        except FileExistsError as error:
            where, remedy = str(self.directory), "give another one with --precision-debug-out"
            raise DumpError(
                "this rank has already written into this run", where=where, remedy=remedy
            ) from error
        except OSError as error:
            raise DumpError(f"cannot write: {error.strerror}", where=str(self.directory)) from error
        self._append_now(Header(coordinates=coordinates))

    def declare_parameters(self, names: Sequence[ParameterDeclaration]) -> None:
        """Write which parameters this rank holds."""
        self._append_now(Parameters(parameters=tuple(names)))

    def write_step(
        self,
        step: int,
        records: Sequence[TensorRecord],
        payloads: Mapping[int, HostTensor],
        *,
        microbatches: int,
        problems: Sequence[Problem] = (),
    ) -> None:
        """Write a step of whole records, as ``write_lines`` does; ``payload`` is filled in there."""
        lines = [RecordLine.of(record) for record in records]
        self.write_lines(step, lines, payloads, microbatches=microbatches, problems=problems)

    def write_lines(
        self,
        step: int,
        records: Sequence[RecordLine],
        payloads: Mapping[int, HostTensor],
        *,
        microbatches: int,
        problems: Sequence[Problem] = (),
    ) -> None:
        """Write a step: payload files, then its lines, then its marker.

        Args:
            step: the step.
            records: its records in execution order.
            payloads: elements by ``seq``, for the records that have some. Read once, file by file.
            microbatches: how many the step ran.
            problems: records that could not be taken.
        """
        if self._broken:
            raise self._refusal()
        self._broken = True  # until this step is whole: after a torn line nothing may follow
        self._jobs.raise_failure()
        files = self._write_payloads(step, records, payloads)
        marker = StepMarker(
            step=step,
            records=len(records),
            payloads=len(files),
            problems=len(problems),
            microbatches=microbatches,
        )
        places = self._new_places(records)
        texts = [record.text(files.get(record.seq), self._place(record)) for record in records]
        self._append([*map(to_json, places), *texts, *map(to_json, problems), to_json(marker)])
        self.records += len(records)
        self._broken = False

    def write_unfinished(self, records: Sequence[RecordLine]) -> None:
        """Write the records of a step that will not end, without a marker: nothing may follow them."""
        if self._broken:
            raise self._refusal()
        self._broken = True
        places = self._new_places(records)
        texts = [record.text(None, self._place(record)) for record in records]
        self._append([*map(to_json, places), *texts])

    def _new_places(self, records: Sequence[RecordLine]) -> list[PlaceDeclaration]:
        """Number the places that no record had before."""
        fresh: list[PlaceDeclaration] = []
        for place in dict.fromkeys(record.place for record in records):
            if place is not None and place not in self._places:
                fresh.append(PlaceDeclaration(number=len(self._places), place=place))
                self._places[place] = len(self._places)
        return fresh

    def _place(self, record: RecordLine) -> int | None:
        return None if record.place is None else self._places[record.place]

    def write_effective(self, state: Mapping[str, Any]) -> None:
        """Write what this rank's objects hold before the first step."""
        self._write_json(EFFECTIVE, {"schema": SCHEMA, **_without_infinities(state)})

    def write_findings(self, findings: Sequence[Mapping[str, Any]]) -> None:
        """Write what was found on this rank while it ran, in place of what was written before."""
        self._write_json(FINDINGS, {"schema": SCHEMA, "findings": _without_infinities(findings)})

    def _write_json(self, name: str, plain: Mapping[str, Any]) -> None:
        try:
            _write_and_rename(self.directory / name, json.dumps(redact(plain), indent=1).encode() + b"\n")
        except OSError as error:
            raise DumpError(f"cannot write: {error.strerror}", where=str(self.directory)) from error

    def close(self, *, complete: bool) -> None:
        """Write what waits and close the index; ``complete``: the run ended as planned, and it is sealed."""
        if self._file.closed:
            return
        self._jobs.finish()
        self._file.close()
        if not complete:
            return
        self._jobs.raise_failure()
        if self._broken:
            raise self._refusal()
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
        self, step: int, records: Sequence[RecordLine], payloads: Mapping[int, HostTensor]
    ) -> dict[int, str]:
        groups: dict[int, list[int]] = {}
        for record in records:
            if record.seq in payloads:
                groups.setdefault(record.microbatch, []).append(record.seq)
        files = {}
        for microbatch, members in groups.items():
            name = self._unused_name(step, microbatch)
            tensors = {str(seq): payloads[seq] for seq in members}
            size = sum(tensor.bits.nbytes for tensor in tensors.values())
            self._jobs.put(partial(self._write_file, name, tensors), size)
            self.payload_bytes += size
            files.update(dict.fromkeys(members, name))
        return files

    def _unused_name(self, step: int, microbatch: int) -> str:
        repeat = 0
        while (name := payload_file(step, microbatch, repeat)) in self._coming or (
            self.directory / name
        ).exists():
            repeat += 1  # the framework ran this step again: keep both
        self._coming.add(name)
        return name

    def _write_file(self, name: str, tensors: Mapping[str, HostTensor]) -> None:
        try:
            write_payload(self.directory / name, tensors)
        except OSError as error:
            raise DumpError(f"cannot write: {error.strerror}", where=str(self.directory / name)) from error
        self._coming.discard(name)

    def _append(self, lines: Sequence[str]) -> None:
        data = "".join(f"{line}\n" for line in lines).encode()
        self._jobs.put(partial(self._write_lines, data, len(lines)), len(data))
        self.index_bytes += len(data)

    def _append_now(self, line: Header | Parameters) -> None:
        self._append([to_json(line)])
        self._jobs.finish()
        self._jobs.raise_failure()

    def _write_lines(self, data: bytes, lines: int) -> None:
        try:
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) or 0 :]
            os.fsync(self._file.fileno())
            if not os.fstat(self._file.fileno()).st_nlink:  # what is written goes nowhere
                raise FileNotFoundError(errno.ENOENT, "the index was removed")
        except OSError as error:
            raise DumpError(f"cannot write: {error.strerror}", where=str(self._path)) from error
        self._digest.update(data)
        self._lines += lines
