"""The records of one rank of a dump, put together from its steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump.reader import RankRecords
from mindspeed_precision.errors import DumpError, IncomparableError
from mindspeed_precision.msprobe.entries import Seen, StepEntries
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

OPERATION = "of an operation, no module"
"""Note of a record that our runs have no counterpart of."""

_UNKNOWN = Digest(fingerprint=0, unordered=0, exact=False)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of one rank, read.

    Attributes:
        level: msprobe's: ``L0``, ``L1``, ``mix``.
        task: ``statistics`` or ``tensor``.
        entries: its entries.
        directory: of the elements.
    """

    level: str
    task: str
    entries: StepEntries
    directory: Path


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
            where, remedy = record.key.describe(), "dump with task tensor"
            raise DumpError("no elements were kept of this record", where=where, remedy=remedy)
        return stored.read()


@dataclass(kw_only=True)
class _Building:
    """The records of one rank while they are made.

    Attributes:
        records: by step.
        stored: files of elements, by the names that the records call them.
        notes: what a reader must know.
        doubled: tensors of one name, by whether their numbers are equal.
        unreadable: by reason, how many files of elements were not read.
    """

    records: dict[int, list[TensorRecord]] = field(default_factory=lambda: defaultdict(list))
    stored: dict[str, Stored] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    doubled: Counter[str] = field(default_factory=Counter)
    unreadable: Counter[str] = field(default_factory=Counter)

    def add(self, step: Step, steps: frozenset[int]) -> None:
        """Add the records of a step; its parameters are what the step before left."""
        seen = list(step.entries.records())
        parts = uncertain_parts(seen)
        known: dict[RecordKey, TensorRecord] = {}
        for number, one in enumerate(seen):
            if one.key in known:
                same = known[one.key].summary == one.tensor.summary
                self.doubled["equal" if same else "other"] += 1
                continue
            note = parts.get(number, "") if one.of_module or one.at_gemm else OPERATION
            known[one.key] = self.record(one, step.directory, note)
        number = step.entries.step
        self.records[number] += known.values()
        before = number - 1 if number > 0 else INIT_STEP
        if before in steps or before == INIT_STEP:
            self.records[before] += self._parameters(step, before)
        elif step.entries.parameters:
            self.notes.append(
                f"{len(step.entries.parameters)} parameters as step {number} found them are not compared: "
                f"step {before} is not in the dump"
            )

    def record(self, seen: Seen, directory: Path, note: str = "") -> TensorRecord:
        """Return a tensor as a record, with elements and fingerprints where its file can be read."""
        tensor = seen.tensor
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
                self.unreadable[f"{error.what} (first: {error.where or seen.entry})"] += 1
        return TensorRecord(
            seq=0,
            key=seen.key,
            shape=tensor.shape[::-1] if seen.transposed else tensor.shape,
            dtype=tensor.dtype,
            layout=None,
            digest=digest,
            payload=payload,
            note=note,
            summary=tensor.summary,
        )

    def _parameters(self, step: Step, before: int) -> Iterator[TensorRecord]:
        phase = Phase.INIT if before == INIT_STEP else Phase.OPTIMIZER
        for name, tensor in step.entries.parameters.items():
            key = RecordKey(step=step.entries.step, phase=phase, fqn=name, role=Role.PARAM)
            made = self.record(Seen(key=key, tensor=tensor, entry=name), step.directory)
            yield replace(made, key=replace(key, step=before))


def _digest(tensor: DumpedTensor) -> Digest:
    return replace(_UNKNOWN, statistics=statistics_from(tensor.summary, tensor.numel))


def rank_of(rank: int, world: int, directory: Path, steps: Sequence[Step]) -> DumpedRank:
    """Return one rank of a dump.

    Args:
        rank: its number.
        world: number of ranks in the dump.
        directory: of the rank in its first step.
        steps: those that could be read.
    """
    building = _Building()
    numbers = frozenset(step.entries.step for step in steps)
    for step in steps:
        building.add(step, numbers)
    records = [record for number in sorted(building.records) for record in building.records[number]]
    notes = [*building.notes, *_skipped(steps), *_counted(building), *_lacking(steps)]
    entries = [step.entries for step in steps]
    return DumpedRank(
        directory=directory,
        coordinates=RankCoordinates(rank=rank, world_size=world, dp_rank=rank, dp_size=world),
        records=tuple(replace(record, seq=seq) for seq, record in enumerate(records)),
        steps=tuple(sorted({*numbers, *([INIT_STEP] if INIT_STEP in building.records else [])})),
        parameters=_declared(entries),
        microbatches={one.step: one.microbatches for one in entries if one.microbatches},
        complete=True,
        notes=tuple(notes),
        stored=building.stored,
        modules=entries[0].modules(),
    )


def _declared(steps: Sequence[StepEntries]) -> tuple[ParameterDeclaration, ...]:
    found: dict[str, ParameterDeclaration] = {}
    for name, tensor in (item for step in steps for item in step.parameters.items()):
        trainable = tensor.requires_grad is not False
        declared = ParameterDeclaration(fqn=name, shape=tensor.shape, dtype=tensor.dtype, trainable=trainable)
        found.setdefault(name, declared)
    return tuple(found.values())


def _skipped(steps: Sequence[Step]) -> list[str]:
    """Say what became no record, counted over the steps."""
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    for entries in (step.entries for step in steps):
        counts.update(entries.skipped)
        for reason, example in entries.examples.items():
            first.setdefault(reason, f"step {entries.step}, {example}")
    return [f"{count} {reason} (first: {first[reason]})" for reason, count in counts.items()]


def _counted(building: _Building) -> Iterator[str]:
    equal, other = building.doubled["equal"], building.doubled["other"]
    if equal:
        yield f"{equal} tensors were dumped more than once under other names, equal each time"
    if other:
        yield f"{other} tensors have the name of an earlier one and other numbers: the first is taken"
    for reason, count in building.unreadable.items():
        yield f"the elements of {count} records cannot be read: {reason}"


def _lacking(steps: Sequence[Step]) -> Iterator[str]:
    """Say what a dump of this level and task does not hold."""
    level, task = steps[0].level, steps[0].task
    lacks = ["strides", "sketches", "the optimizer's numbers", "data", "losses", "configuration"]
    if task != "tensor":
        lacks = ["fingerprints", "counts of zeros", "histograms of exponents", *lacks]
    yield f"level {level}, task {task}: a dump of msprobe holds no {', '.join(lacks)}"
    if not any(step.entries.construct.parents for step in steps):
        yield "its construct.json names no module: no operation has a place in the model, nor a microbatch"
