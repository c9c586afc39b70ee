"""Reading a run: what is there is returned, what is missing is said, what is broken is refused."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.config import NumberSet
from mindspeed_precision.dump.attempts import attempt_directories
from mindspeed_precision.dump.collection import no_collection
from mindspeed_precision.dump.effective import check_effective
from mindspeed_precision.dump.format import (
    COMPLETE,
    COMPLETE_KEYS,
    DIGEST_ALGORITHM,
    EFFECTIVE,
    FINDINGS,
    FINDINGS_KEYS,
    FINGERPRINT,
    INDEX,
    MANIFEST,
    READABLE,
    SCHEMA,
    Header,
    Parameters,
    PlaceDeclaration,
    Problem,
    StepMarker,
    parse_line,
    rank_directory,
)
from mindspeed_precision.dump.inside import read_inside, require_inside
from mindspeed_precision.dump.joining import join
from mindspeed_precision.dump.manifest import check_manifest, without_empty_sections
from mindspeed_precision.dump.object_store import local_directory
from mindspeed_precision.dump.payload import PayloadFile
from mindspeed_precision.dump.strict_json import check_keys, load_object
from mindspeed_precision.errors import DumpError
from mindspeed_precision.records import ParameterDeclaration, Place, RankCoordinates, TensorRecord
from mindspeed_precision.redaction import redact


@dataclass(frozen=True, kw_only=True)
class RankRecords:
    """What one rank wrote.

    Attributes:
        directory: the rank's directory.
        coordinates: where the rank sits.
        records: of whole steps only, in execution order.
        steps: the whole steps, in the order in which they ran; ``INIT_STEP`` for what was before the first.
        parameters: the parameters that the rank declared.
        microbatches: by step, how many it ran.
        complete: the rank ended as planned.
        findings: what this rank found while it ran, if it is not in the manifest.
        notes: what a reader must know of this rank.
        fingerprint: definition of the records' fingerprints.
        effective: what the rank's objects held before the first step (``groups``, ``tied``, ``modules``);
            empty where that was not recorded.
        unfinished: records of the step in which the rank ended by an error; part of no whole step.
        joined: where the training was restarted, the directories of its attempts whose steps these are.
        places: of a rank some of whose records were left out, where they come (``align.ranges``); else None.
    """

    directory: Path
    coordinates: RankCoordinates
    records: Sequence[TensorRecord]
    steps: tuple[int, ...]
    parameters: tuple[ParameterDeclaration, ...]
    microbatches: dict[int, int]
    complete: bool
    findings: tuple[Any, ...] = ()
    notes: tuple[str, ...] = ()
    fingerprint: str = FINGERPRINT
    effective: Mapping[str, Any] = field(default_factory=dict)
    unfinished: tuple[TensorRecord, ...] = ()
    joined: tuple[Path, ...] = ()
    places: Mapping[int, tuple[int, ...]] | None = field(default=None, compare=False, repr=False)
    _origins: Mapping[int, tuple[RankRecords, TensorRecord]] = field(
        default_factory=dict, compare=False, repr=False
    )
    _files: dict[str, PayloadFile] = field(default_factory=dict, compare=False, repr=False)

    def holds(self, fqn: str) -> bool:
        """Tell whether a parameter that is declared here is held here: of one rank, always."""
        return any(parameter.fqn == fqn for parameter in self.parameters)

    def payload(self, record: TensorRecord) -> HostTensor:
        """Return the elements of a record of this rank.

        Raises:
            DumpError: it has none, or its file is absent, truncated, or does not fit the record.
        """
        name = record.payload
        if record.seq in self._origins:
            rank, original = self._origins[record.seq]
            return rank.payload(original)
        if name is None:
            remedy = "record it at level tensor (capture.level or a rule in capture.rules)"
            raise DumpError(
                "no elements were kept of this record", where=record.key.describe(), remedy=remedy
            )
        if Path(name).name != name:
            raise DumpError("not a file of this rank", where=str(self.directory), found=repr(name))
        if name not in self._files:
            require_inside(self.directory / name, self.directory.parent)
            self._files[name] = PayloadFile(self.directory / name)
        return self._files[name].read(str(record.seq), dtype=record.dtype, shape=record.shape)


@dataclass(frozen=True, kw_only=True)
class MissingRanks:
    """Ranks that were to record and have no records.

    Attributes:
        count: how many.
        text: which, in words.
    """

    count: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run directory, read.

    Attributes:
        path: the directory.
        manifest: ``run.json``.
        ranks: by rank number, ascending.
        notes: what a reader must know: ranks that are missing or did not end, steps and records lost.
        missing: ranks that were to record and have no records; a note says it, too.
    """

    path: Path
    manifest: dict[str, Any]
    ranks: dict[int, RankRecords]
    notes: tuple[str, ...] = ()
    missing: MissingRanks | None = None

    @property
    def framework(self) -> str:
        """Name of the framework that computed the run; empty where its manifest names none."""
        found = self.manifest.get("framework")
        return str(found.get("name", "")) if isinstance(found, dict) else ""

    @property
    def perturbed(self) -> str:
        """What noise its parameters were given (setting ``perturb``), in words; empty for none."""
        settings = self.manifest.get("settings")
        found = settings.get("perturb") if isinstance(settings, dict) else None
        if not isinstance(found, dict) or not found.get("epsilon"):
            return ""
        named = "" if found.get("fqn", "*") == "*" else f" on {found['fqn']}"
        return f"noise of epsilon={found['epsilon']}, seed {found.get('seed', 0)}{named}"


Wanted = Callable[[TensorRecord], bool]
"""Tells whether a record is kept when a run is read."""


def load_run(directory: str | Path, *, wanted: Wanted | None = None) -> Run:
    """Read a run directory, and the restarts in it as one with it.

    A crashed run is read up to its last whole step, and ``notes`` say so.

    Args:
        directory: its path, or a URL that fsspec reads.
        wanted: which records are kept; each rank is read whole, and then thinned, so that memory holds one
            rank and what is wanted of the others. Of a run that was restarted every record is held while it
            is put together; of fingerprints of an older definition every record is kept. None: all.

    Raises:
        DumpError: no such directory, not a run, another schema, no rank that wrote anything, or a file whose
            content is not what was written.
    """
    path = local_directory(directory)
    load_manifest(path)  # refuses what is no run
    restarts = attempt_directories(path)
    first = load_attempt(path, None if restarts else wanted)
    for restart in restarts:
        require_inside(restart, path)
    runs = [("", first), *((restart.name, load_attempt(restart)) for restart in restarts)]
    if not any(run.ranks for _, run in runs):
        raise DumpError("no rank of this run wrote anything", where=str(path), expected=rank_directory(0))
    return thinned(join(runs), wanted) if restarts else first


def thinned(run: Run, wanted: Wanted | None) -> Run:
    """Return a run with those records alone that are wanted; all of another definition of fingerprints."""
    return replace(run, ranks={number: _thinned(rank, wanted) for number, rank in run.ranks.items()})


def _thinned(rank: RankRecords, wanted: Wanted | None) -> RankRecords:
    if wanted is None or rank.fingerprint != FINGERPRINT:
        return rank
    return replace(rank, records=tuple(filter(wanted, rank.records)))


def load_attempt(path: Path, wanted: Wanted | None = None) -> Run:
    """Read one attempt, which may have written nothing; restarts that lie in it are left out."""
    manifest = load_manifest(path)
    ranks: dict[int, RankRecords] = {}
    notes: list[str] = []
    for rank in rank_numbers(path, manifest):
        records = load_rank(path / rank_directory(rank))
        if records is None:
            notes.append(nothing_written(rank))
            continue
        require_rank(records, rank)
        ranks[rank] = _thinned(records, wanted)
        notes += [f"rank {rank}: {note}" for note in records.notes]
    return run_of(path, manifest, ranks, notes)


def run_of(path: Path, manifest: dict[str, Any], ranks: dict[int, RankRecords], notes: Sequence[str]) -> Run:
    """Return a run of these ranks, which knows which others were to record; the last note tells it."""
    missing = _missing_ranks(path, manifest, ranks) if ranks else None
    told = tuple(notes) if missing is None else (*notes, missing.text)
    return Run(path=path, manifest=manifest, ranks=ranks, notes=told, missing=missing)


def nothing_written(rank: int) -> str:
    """Return the note of a rank that wrote no record."""
    return f"rank {rank} wrote no record: it ended before its first step"


def require_rank(records: RankRecords, rank: int) -> None:
    """Require that a directory holds the rank whose name it has.

    Raises:
        DumpError: it holds another one.
    """
    if records.coordinates.rank != rank:
        where, found = str(records.directory), f"rank {records.coordinates.rank}"
        raise DumpError(
            "this directory holds another rank", where=where, found=found, expected=f"rank {rank}"
        )


def load_manifest(path: Path) -> dict[str, Any]:
    """Read ``run.json``.

    Raises:
        DumpError: no such directory, not a run, or one of another schema.
    """
    if not path.exists():
        raise DumpError("no such run directory", where=str(path))
    if not path.is_dir():
        raise DumpError("not a directory", where=str(path), expected="the directory of a run")
    file = path / MANIFEST
    if not file.is_file():
        entries = sorted(entry.name for entry in path.iterdir())
        found = (
            f"{', '.join(entries[:3])}{' …' if len(entries) > 3 else ''}" if entries else "an empty directory"
        )
        raise DumpError("not a run", where=str(path), found=found, expected=MANIFEST)
    manifest = load_object(read_inside(file, path), where=str(file))
    schema = manifest.get("schema")
    if type(schema) is not int or schema not in READABLE:
        remedy = "read it with the version of mindspeed_precision that wrote it"
        raise DumpError(
            "a run of another schema",
            where=str(file),
            found=repr(schema),
            expected=" or ".join(map(str, READABLE)),
            remedy=remedy,
        )
    check_manifest(manifest, where=str(file))
    shown: dict[str, Any] = redact(without_empty_sections(manifest))  # an older version wrote it as it came
    return shown


_PROBED = 1 << 14
"""Ranks that are looked for by name though no listing shows them."""


def rank_numbers(path: Path, manifest: dict[str, Any]) -> list[int]:
    """Return the ranks that have a directory, those too that a stale listing does not show."""
    matches = (re.fullmatch(r"rank(\d{5,})", entry.name) for entry in path.iterdir() if entry.is_dir())
    listed = {int(match.group(1)) for match in matches if match}
    wanted, _ = _wanted_ranks(path, manifest, 0)
    unlisted = islice((rank for some in wanted for rank in some if rank not in listed), _PROBED)
    return sorted(listed.union(rank for rank in unlisted if (path / rank_directory(rank)).is_dir()))


def _wanted_ranks(path: Path, manifest: dict[str, Any], default: int) -> tuple[list[range], int]:
    """Return the ranks that were to record, and how many there were: ``default`` where that is not said."""
    parallel, settings = manifest.get("parallel"), manifest.get("settings")
    size = parallel.get("world_size") if isinstance(parallel, dict) else None
    if type(size) is not int:
        size = default
    wanted = settings.get("ranks", "") if isinstance(settings, dict) else ""
    return NumberSet.parse(str(wanted), where=f"{path / MANIFEST}: settings.ranks").below(size), size


def _missing_ranks(
    path: Path, manifest: dict[str, Any], ranks: Mapping[int, RankRecords]
) -> MissingRanks | None:
    """Return the ranks that should have recorded and did not; None where all did.

    Args:
        path: of the run.
        manifest: of it.
        ranks: those that did; at least one.
    """
    wanted, size = _wanted_ranks(path, manifest, next(iter(ranks.values())).coordinates.world_size)
    # never a list of them: a damaged file may speak of any number
    number = sum(some.stop - some.start for some in wanted)
    number -= sum(any(rank in some for some in wanted) for rank in ranks)
    if not number:
        return None
    missing = islice((rank for some in wanted for rank in some if rank not in ranks), 8)
    names = ", ".join(map(str, missing)) + (" …" if number > 8 else "")
    return MissingRanks(count=number, text=f"no records of {number} of {size} ranks: {names}")


@dataclass
class _Index:
    """An index while it is read: ``pending`` holds the lines since the last step marker."""

    path: Path
    coordinates: RankCoordinates | None = None
    schema: int = SCHEMA
    fingerprint: str = FINGERPRINT
    parameters: list[ParameterDeclaration] = field(default_factory=list)
    records: list[TensorRecord] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    microbatches: dict[int, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    pending: list[TensorRecord] = field(default_factory=list)
    pending_problems: list[Problem] = field(default_factory=list)

    def add(self, text: bytes, number: int) -> None:
        where = f"{self.path}:{number}"
        line = parse_line(text, where=where, schema=self.schema, places=self.places)
        if isinstance(line, Header) != (number == 1):
            raise DumpError("a header is the first line and no other", where=where)
        if isinstance(line, Header):
            self.coordinates, self.schema = line.coordinates, line.schema
            self.fingerprint = line.fingerprint
        elif isinstance(line, Parameters):
            self.parameters += line.parameters
        elif isinstance(line, PlaceDeclaration):
            self._add_place(line, where)
        elif isinstance(line, Problem):
            self.pending_problems.append(line)
        elif isinstance(line, StepMarker):
            self._end_step(line, where)
        else:
            self._add_record(line, where)

    def _add_place(self, line: PlaceDeclaration, where: str) -> None:
        if line.number != len(self.places):
            found, expected = f"placement {line.number}", f"placement {len(self.places)}"
            raise DumpError("a line is missing or repeated", where=where, found=found, expected=expected)
        self.places.append(line.place)

    def _add_record(self, record: TensorRecord, where: str) -> None:
        expected = len(self.records) + len(self.pending)
        if record.seq != expected:
            raise DumpError(
                "a line is missing or repeated",
                where=where,
                found=f"seq {record.seq}",
                expected=f"seq {expected}",
            )
        self.pending.append(record)

    def _end_step(self, marker: StepMarker, where: str) -> None:
        found = (
            len(self.pending),
            sum(r.payload is not None for r in self.pending),
            len(self.pending_problems),
        )
        if found != (marker.records, marker.payloads, marker.problems):
            raise DumpError(
                "a step does not hold what its marker says",
                where=where,
                found="{} records, {} payloads, {} problems".format(*found),
                expected=f"{marker.records}, {marker.payloads}, {marker.problems}",
            )
        if marker.step in self.microbatches:
            self.notes.append(f"step {marker.step} was run more than once; every run of it was recorded")
        self.microbatches[marker.step] = marker.microbatches
        self.records += self.pending
        self.problems += self.pending_problems
        self.pending, self.pending_problems = [], []


def load_rank(directory: Path) -> RankRecords | None:
    """Read one rank's directory; None if it holds no whole line.

    Raises:
        DumpError: a file of it is not what was written.
    """
    path, run = directory / INDEX, directory.parent
    require_inside(directory, run)
    if not path.is_file():
        if (directory / COMPLETE).exists():
            raise DumpError("sealed, but the index is gone", where=str(path))
        return None
    data = read_inside(path, run)
    lines = data.split(b"\n")
    torn = lines.pop()
    complete = check_seal(directory / COMPLETE, data, len(lines))
    index = _Index(path=path)
    with no_collection():
        for number, text in enumerate(lines, start=1):
            index.add(text, number)
    if index.coordinates is None:
        return None
    return RankRecords(
        directory=directory,
        coordinates=index.coordinates,
        records=tuple(index.records),
        steps=tuple(index.microbatches),
        parameters=tuple(index.parameters),
        microbatches=index.microbatches,
        complete=complete,
        findings=load_findings(directory),
        notes=tuple(_notes(index, torn=bool(torn), complete=complete)),
        fingerprint=index.fingerprint,
        effective=_load_effective(directory / EFFECTIVE),
        unfinished=tuple(index.pending),
    )


def _load_effective(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    plain = load_object(read_inside(path, path.parent.parent), where=str(path))
    check_effective(plain, where=str(path))
    return plain


def load_findings(directory: Path) -> tuple[Any, ...]:
    """Return what a rank found while it ran.

    Raises:
        DumpError: the file is not what was written.
    """
    path = directory / FINDINGS
    if not path.exists():
        return ()
    plain = load_object(read_inside(path, path.parent.parent), where=str(path))
    check_keys(plain, FINDINGS_KEYS, where=str(path))
    return tuple(redact(plain["findings"]))


def _notes(index: _Index, *, torn: bool, complete: bool) -> Iterator[str]:
    if not complete:
        last = max(index.microbatches, default=None)
        until = "before the end of its first step" if last is None else f"after step {last} was written"
        yield f"did not end as planned (no {COMPLETE}): it stopped {until}"
    if index.pending or index.pending_problems or torn:
        step = f"step {index.pending[0].key.step}" if index.pending else "the last step"
        torn_line = " and a torn last line" if torn else ""
        yield f"{step} is not whole: dropped {len(index.pending)} records without a step marker{torn_line}"
    yield from index.notes
    reasons = Counter(problem.reason for problem in index.problems)
    first = {problem.reason: problem for problem in reversed(index.problems)}
    for reason, count in reasons.items():
        what = first[reason].record or f"step {first[reason].step}"
        yield f"{count} records could not be taken: {reason} (first: {what})"


def check_seal(path: Path, data: bytes, lines: int) -> bool:
    """Compare the index with its seal; False if there is none.

    Args:
        path: of the seal.
        data: content of the index.
        lines: how many whole lines that has.

    Raises:
        DumpError: the index was changed or cut off after it was sealed.
    """
    if not path.exists():
        return False
    seal = load_object(read_inside(path, path.parent.parent), where=str(path))
    check_keys(seal, COMPLETE_KEYS, where=str(path))
    if seal["algorithm"] != DIGEST_ALGORITHM:
        found = seal["algorithm"]
        raise DumpError("sealed with another digest", where=str(path), found=found, expected=DIGEST_ALGORITHM)
    if seal["lines"] != lines:
        found, expected = f"{lines} whole lines", f"{seal['lines']}"
        raise DumpError("truncated index", where=str(path.with_name(INDEX)), found=found, expected=expected)
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    if digest != seal["digest"]:
        where = str(path.with_name(INDEX))
        raise DumpError("changed since it was sealed", where=where, found=digest, expected=seal["digest"])
    return True
