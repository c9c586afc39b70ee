"""A dump of msprobe, read as a run: what it says becomes records, what it lacks stays absent and is said.

It is read into memory, as it is: no copy in our own format is made, which could not say that a fingerprint
is not known.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump.collection import no_collection
from mindspeed_precision.dump.reader import RankRecords, Run
from mindspeed_precision.errors import DumpError, IncomparableError
from mindspeed_precision.msprobe.calls import Construct
from mindspeed_precision.msprobe.entries import Seen, StepEntries
from mindspeed_precision.msprobe.files import CONSTRUCT, DUMP, ELEMENTS, WRITTEN_BY, Place, places, read_json
from mindspeed_precision.msprobe.parts import uncertain_parts
from mindspeed_precision.msprobe.payloads import Stored
from mindspeed_precision.msprobe.tensors import DumpedTensor, statistics_from
from mindspeed_precision.record.statistics import digest_host
from mindspeed_precision.records import (
    INIT_STEP,
    Digest,
    ParameterDeclaration,
    Phase,
    RankCoordinates,
    RecordKey,
    Role,
    TensorRecord,
)

TOOL = "msprobe"
"""What ``recorded_by`` in the manifest of such a run says."""

_FRAMEWORKS = {"pytorch": ("torch", "torch"), "mindspore": ("mindspore", "mindspore")}
_FRAMEWORKS["mindtorch"] = ("mindspore", "torch")

_UNKNOWN = Digest(fingerprint=0, unordered=0, exact=False)


@dataclass(frozen=True, kw_only=True)
class DumpedRank(RankRecords):
    """One rank of a dump.

    Attributes:
        stored: by the name of a record's payload, the file of its elements.
        modules: by canonical name of a module, msprobe's name of its first call.
    """

    stored: Mapping[str, Stored] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)

    def payload(self, record: TensorRecord) -> HostTensor:
        """Return the elements of a record of this rank.

        Raises:
            DumpError: it has none, or its file is absent, leaves the dump, or does not fit.
        """
        stored = self.stored.get(record.payload or "")
        if stored is None:
            remedy = "dump with task tensor"
            raise DumpError(
                "no elements were kept of this record", where=record.key.describe(), remedy=remedy
            )
        return stored.read()


def load_dump(path: str | Path) -> Run:
    """Read a dump of msprobe: its directory, one of its steps or ranks, or a ``dump.json``.

    Raises:
        DumpError: there is no dump, or no step of it can be read.
    """
    root = Path(path)
    found = places(root)
    by_rank: dict[int, list[Place]] = defaultdict(list)
    for place in found:
        by_rank[place.rank].append(place)
    ranks: dict[int, RankRecords] = {}
    notes: list[str] = []
    heads: dict[str, Any] = {}
    failures: list[DumpError] = []
    for rank, of_rank in sorted(by_rank.items()):
        steps, lost = _steps(of_rank)
        failures += lost
        notes += [f"rank {rank}: left out: {error}" for error in lost]
        if steps:
            ranks[rank] = _rank(rank, len(by_rank), of_rank[0].directory, steps)
            heads = heads or steps[0].head
            notes += [f"rank {rank}: {note}" for note in ranks[rank].notes]
    if not ranks:
        raise failures[0]
    return Run(path=root, manifest=_manifest(heads, ranks), ranks=ranks, notes=tuple(notes))


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One step of one rank, read.

    Attributes:
        head: ``dump.json`` without its entries.
        entries: its entries.
        directory: of the elements.
    """

    head: Mapping[str, Any]
    entries: StepEntries
    directory: Path


def _steps(of_rank: Iterable[Place]) -> tuple[list[_Step], list[DumpError]]:
    """Return the steps of a rank that can be read, and why the others cannot."""
    steps, lost = [], []
    with no_collection():
        for place in of_rank:
            try:
                steps.append(_step(place))
            except DumpError as error:
                lost.append(error)
    return steps, lost


def _step(place: Place) -> _Step:
    file = place.directory / DUMP
    head = read_json(file)
    data, framework = head.pop("data", None), head.get("framework")
    if not isinstance(data, dict):
        found = type(data).__name__
        raise DumpError("no entries", where=str(file), found=found, expected="an object under data")
    if framework not in _FRAMEWORKS:
        expected = " or ".join(_FRAMEWORKS)
        raise DumpError("another framework", where=str(file), found=str(framework)[:60], expected=expected)
    construct = place.directory / CONSTRUCT
    inside = Construct.of(read_json(construct)) if construct.exists() else Construct()
    entries = StepEntries(
        step=place.step,
        framework=str(framework),
        data=data,
        construct=inside,
        exported=head.get("written_by") == WRITTEN_BY,
    )
    return _Step(head=head, entries=entries, directory=place.directory / ELEMENTS)


@dataclass
class _Building:
    """The records of one rank while they are made."""

    records: dict[int, list[TensorRecord]] = field(default_factory=lambda: defaultdict(list))
    stored: dict[str, Stored] = field(default_factory=dict)
    unreadable: Counter[str] = field(default_factory=Counter)

    def record(self, seen: Seen, directory: Path, note: str = "") -> TensorRecord:
        """Return a tensor as a record, with elements and fingerprints where its file can be read."""
        tensor = seen.tensor
        shape = tensor.shape[::-1] if seen.transposed else tensor.shape
        payload, digest = None, _digest(tensor)
        if tensor.file is not None:
            name = f"{seen.key.step}/{tensor.file}" + ("^T" if seen.transposed else "")
            stored = Stored(
                directory=directory,
                name=tensor.file,
                dtype=tensor.dtype,
                shape=tensor.shape,
                transposed=seen.transposed,
            )
            try:
                digest = digest_host(stored.read(), statistics=True)
                self.stored[name], payload = stored, name
            except (DumpError, IncomparableError) as error:
                self.unreadable[error.what] += 1
        return TensorRecord(
            seq=0,
            key=seen.key,
            shape=shape,
            dtype=tensor.dtype,
            layout=None,
            digest=digest,
            payload=payload,
            note=note,
            summary=tensor.summary,
        )


def _digest(tensor: DumpedTensor) -> Digest:
    return replace(_UNKNOWN, statistics=statistics_from(tensor.summary, tensor.numel))


def _rank(rank: int, world: int, directory: Path, steps: list[_Step]) -> DumpedRank:
    building, notes = _Building(), []
    first = min(step.entries.step for step in steps)
    numbers = {step.entries.step for step in steps}
    doubled: Counter[str] = Counter()
    for step in steps:
        entries = step.entries
        parts = {}
        seen = list(entries.records())
        parts = uncertain_parts(seen)
        known: dict[RecordKey, TensorRecord] = {}
        for number, one in enumerate(seen):
            if one.key in known:
                doubled["equal" if known[one.key].summary == one.tensor.summary else "other"] += 1
                continue
            known[one.key] = building.record(one, step.directory, parts.get(number, ""))
        building.records[entries.step] += known.values()
        before = entries.step - 1 if entries.step > 0 else INIT_STEP
        if before in numbers or before == INIT_STEP:
            building.records[before] += _parameter_records(entries, before, building, step.directory)
        else:
            notes.append(
                f"{len(entries.parameters)} parameters as step {entries.step} found them are not compared: "
                f"step {before} is not in the dump"
            )
        notes += _skipped(entries)
    notes += _doubled(doubled) + _unreadable(building) + _lacking(steps)
    records = [r for number in sorted(building.records) for r in building.records[number]]
    return DumpedRank(
        directory=directory,
        coordinates=RankCoordinates(rank=rank, world_size=world, dp_rank=rank, dp_size=world),
        records=tuple(replace(record, seq=seq) for seq, record in enumerate(records)),
        steps=tuple(sorted({*numbers, *([INIT_STEP] if first == 0 else [])})),
        parameters=_declared(steps),
        microbatches={s.entries.step: s.entries.microbatches for s in steps if s.entries.microbatches},
        complete=True,
        notes=tuple(dict.fromkeys(notes)),
        stored=building.stored,
        modules=steps[0].entries.modules(),
    )


def _parameter_records(
    entries: StepEntries, step: int, building: _Building, directory: Path
) -> Iterator[TensorRecord]:
    """Yield the parameters as the step found them: the step before had left them so."""
    phase = Phase.INIT if step == INIT_STEP else Phase.OPTIMIZER
    for name, tensor in entries.parameters.items():
        key = RecordKey(step=step, phase=phase, fqn=name, role=Role.PARAM)
        seen = Seen(key=key, tensor=tensor, entry=name)
        found = building.record(replace(seen, key=replace(key, step=entries.step)), directory)
        yield replace(found, key=key)


def _declared(steps: list[_Step]) -> tuple[ParameterDeclaration, ...]:
    found: dict[str, ParameterDeclaration] = {}
    for step in steps:
        for name, tensor in step.entries.parameters.items():
            trainable = tensor.requires_grad is not False
            declared = ParameterDeclaration(
                fqn=name, shape=tensor.shape, dtype=tensor.dtype, trainable=trainable
            )
            found.setdefault(name, declared)
    return tuple(found.values())


def _skipped(entries: StepEntries) -> list[str]:
    return [
        f"step {entries.step}: {count} {reason} (first: {entries.examples[reason]})"
        for reason, count in entries.skipped.items()
    ]


def _doubled(doubled: Counter[str]) -> list[str]:
    notes = []
    if doubled["equal"]:
        notes.append(f"{doubled['equal']} tensors were dumped more than once under other names, equal each time")
    if doubled["other"]:
        notes.append(
            f"{doubled['other']} tensors have the name of an earlier one and other numbers: the first is taken"
        )
    return notes


def _unreadable(building: _Building) -> list[str]:
    return [
        f"the elements of {count} records cannot be read: {reason}"
        for reason, count in building.unreadable.items()
    ]


def _lacking(steps: list[_Step]) -> list[str]:
    """Say what a dump of this level and task does not hold."""
    head = steps[0].head
    level, task = (str(head.get(name, "?"))[:20] for name in ("level", "task"))
    lacks = ["strides", "sketches", "the optimizer's numbers", "data", "losses", "configuration"]
    if task != "tensor":
        lacks.insert(0, "fingerprints, counts of zeros, histograms of exponents")
    notes = [f"msprobe {level} {task}: a dump holds no {', '.join(lacks)}"]
    if not any(step.entries.construct.parents for step in steps):
        notes.append("without construct.json no operation has a place in the model, nor a microbatch")
    return notes


def _manifest(head: Mapping[str, Any], ranks: Mapping[int, RankRecords]) -> dict[str, Any]:
    name, api = _FRAMEWORKS[str(head.get("framework"))]
    plain = {key: value for key, value in head.items() if isinstance(value, str | int | float | bool)}
    manifest = {"framework": {"name": name, "version": "", "api": api}, "recorded_by": TOOL, TOOL: plain}
    if any(INIT_STEP in rank.steps for rank in ranks.values()):
        manifest["first_step"] = 0
    return manifest


def is_dump(run: Run) -> bool:
    """Tell whether a run was read from a dump of msprobe."""
    return run.manifest.get("recorded_by") == TOOL
