"""Runs of different parallel layouts: the records of all ranks become those of one canonical model.

What a rank holds of a tensor is a shard of a canonical one, a replica of it, a term of a sum, or several of
these. Its placement says which (``records.Placement``): of parameters and all that has one element for each
of their elements Megatron's attributes tell it, of what modules receive and return the rules beside the
patches. Fingerprints, statistics and sketches of shards add up, of sums the sketches alone
(``record.merge``), so that no tensor is moved; replicas are checked to be replicas. Of a record without a
rule nothing is said: it is listed as incomparable, with the reason, and never compared.

In the canonical run a "rank" is a lane (``align.lanes``): one per data-parallel rank where both runs have as
many of them, since each then sees the same part of the batch; of each one per context-parallel rank where
both split the sequence alike; of each one per tensor-parallel rank where both split activations alike; else
one. Parameters are in the first lane of those that see the same part of the batch.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mindspeed_precision.align.lanes import Experts, Lanes, common_experts, common_lanes, layout_of
from mindspeed_precision.align.merging import BEFORE_REDUCTION, Merger
from mindspeed_precision.align.microbatches import OTHER_BATCHES, Numbering, common_numbering
from mindspeed_precision.align.shards import CanonicalRank, Merged, Shard
from mindspeed_precision.dump.reader import RankRecords, Run
from mindspeed_precision.record.placement import parameter_of
from mindspeed_precision.records import (
    NO_MICROBATCH,
    ParameterDeclaration,
    Part,
    Phase,
    Placement,
    RankCoordinates,
    RecordKey,
    ReplicasDiffer,
    Role,
    Side,
    TensorRecord,
    Unplaced,
)

_OF_MODULES = frozenset({Phase.FPROP, Phase.DGRAD, Phase.WGRAD})
_NOBODYS = "collective"
"""Name of collectives that belong to no module (``capture.collectives``); they are counted per rank."""

_OF_BATCH = frozenset({Role.LOSS, Role.BATCH})
_OTHER_TOKENS = "not summed yet over the context-parallel group"
_OTHER_EXPERT_TOKENS = "an expert's tokens come from other ranks"
_EXPERT = re.compile(r".*\.experts(?:\..*)?")
"""Names of what has the tokens of all ranks over which experts are distributed."""
_GROUPED = re.compile(r".*\.experts\.weight\d+")
"""A weight of several experts, which are others on other ranks."""


@dataclass(frozen=True, kw_only=True)
class Canonical:
    """A run as one canonical model.

    Attributes:
        run: its lanes, as ranks.
        unruled: records that have no layout rule, with the reason.
        unplaced: parameters of which it is not known where their shards sit.
        replicas: replicas that differ.
        notes: what a reader must know.
    """

    run: Run
    unruled: Mapping[RecordKey, str]
    unplaced: frozenset[str]
    replicas: tuple[ReplicasDiffer, ...]
    notes: tuple[str, ...]


def canonical_runs(baseline: Run, candidate: Run) -> tuple[Canonical, Canonical]:
    """Return two runs of different layouts as canonical ones, over the same lanes."""
    layouts = layout_of(baseline), layout_of(candidate)
    lanes, experts = common_lanes(*layouts), common_experts(*layouts)
    numberings = common_numbering(baseline, candidate) if lanes is Lanes.NONE else (None, None)
    spanning = _spanning(baseline) | _spanning(candidate)
    one, two = (
        canonical(run, side, lanes=lanes, experts=experts, spanning=spanning, numbering=numbering)
        for run, side, numbering in zip((baseline, candidate), Side, numberings, strict=True)
    )
    unplaced = one.unplaced | two.unplaced
    return _without(one, unplaced), _without(two, unplaced)


def _without(found: Canonical, unplaced: frozenset[str]) -> Canonical:
    """Leave out of the declarations what one of the runs cannot place."""
    ranks: dict[int, RankRecords] = {
        number: replace(rank, parameters=tuple(p for p in rank.parameters if p.fqn not in unplaced))
        for number, rank in found.run.ranks.items()
    }
    return replace(found, run=replace(found.run, ranks=ranks))


def canonical(
    run: Run,
    side: Side,
    *,
    lanes: Lanes,
    experts: Experts = Experts.MODULES,
    spanning: frozenset[str] = frozenset(),
    numbering: Numbering | None = None,
) -> Canonical:
    """Merge the ranks of a run.

    Args:
        run: the run.
        side: which one it is, for messages.
        lanes: what the other run splits as this one does, so that it can be compared.
        experts: what of an expert is the same in the other run.
        spanning: names of modules that have parts on several pipeline stages, in either run.
        numbering: the number of each microbatch in the whole batch, where both runs have the same one; None:
            they are not known to.
    """
    groups = _Groups(run, lanes=lanes, experts=experts, spanning=spanning, numbering=numbering)
    for number, rank in run.ranks.items():
        groups.add(number, rank)
    merged = groups.merged()
    ranks: dict[int, RankRecords] = {
        lane: _lane(
            run, lane, [run.ranks[n] for n in members], merged.get(lane, []), frozenset(groups.held[lane])
        )
        for lane, members in groups.members.items()
    }
    return Canonical(
        run=replace(run, ranks=ranks),
        unruled=groups.unruled,
        unplaced=frozenset(groups.unplaced),
        replicas=tuple(replace(difference, side=side) for difference in groups.replicas),
        notes=tuple(groups.notes(side)),
    )


class _Groups:
    """The records of all ranks, sorted by the canonical record that they are part of."""

    def __init__(
        self,
        run: Run,
        *,
        lanes: Lanes,
        experts: Experts,
        spanning: frozenset[str],
        numbering: Numbering | None,
    ) -> None:
        self._lanes = lanes
        self._experts = experts
        self._spanning = spanning
        self._numbering = numbering
        self._chunks = bool(layout_of(run)["virtual_pipeline_model_parallel_size"])
        self.members: dict[int, list[int]] = defaultdict(list)
        for number, rank in run.ranks.items():
            self.members[lanes.of(rank.coordinates)].append(number)
        self._merger = Merger(run)
        self._parameters: dict[tuple[int, RecordKey], list[Shard]] = defaultdict(list)
        self._activations: dict[tuple[int, RecordKey], list[Shard]] = defaultdict(list)
        self._replicated: dict[tuple[int, RecordKey], list[tuple[int, TensorRecord]]] = defaultdict(list)
        self._left: dict[tuple[int, RecordKey], list[tuple[int, TensorRecord]]] = defaultdict(list)
        self.held: dict[int, set[str]] = defaultdict(set)
        self._repeated = 0
        self.unruled = self._merger.unruled
        self.unplaced: set[str] = set()

    @property
    def replicas(self) -> list[ReplicasDiffer]:
        """Copies that differ, in execution order."""
        return [found for _, found in sorted(self._merger.replicas, key=lambda item: item[0])]

    def add(self, number: int, rank: RankRecords) -> None:
        """Sort in the records of one rank."""
        placements = {p.fqn: _placement(p, rank.coordinates) for p in rank.parameters}
        self.unplaced |= {name for name, placement in placements.items() if placement is None}
        last = {record.key: record for record in rank.records}
        self._repeated += len(rank.records) - len(last)
        lane = self._lanes.shared(rank.coordinates)
        self.held[lane] |= {placed.copy_of or name if placed else name for name, placed in placements.items()}
        for record in last.values():
            name = parameter_of(record.key, placements)
            if name is not None:
                self._add_parameter(number, rank.coordinates, record, placements[name], name)
            elif _of_module(record.key):
                self._add_activation(number, rank.coordinates, record)
            else:
                self._add_other(number, rank.coordinates, record, placements)

    def _add_parameter(
        self,
        rank: int,
        where: RankCoordinates,
        record: TensorRecord,
        placement: Placement | None,
        name: str,
    ) -> None:
        lane, key = self._lanes.shared(where), record.key
        early = key.phase in BEFORE_REDUCTION
        if placement is None:
            self._leave(lane, rank, record, key, f"no layout rule for {name}")
            return
        key, factor = _canonical_key(key, name, placement), 1.0
        unsummed = self._unsummed(key, name, where) if early else ""
        if unsummed:
            self._leave(lane, rank, record, key, unsummed)
            return
        if early and self._numbering is not None:
            key, factor = self._numbering.key(key, where), self._numbering.factor(key)
        start, stop = record.part or (0, placement.local_numel)
        numbered = record.part is not None or placement.whole
        if record.numel != stop - start or not numbered:
            self._leave(lane, rank, record, key, "its elements are not numbered as the parameter's are")
            return
        own = placement if early else replace(placement, partial="")  # later it has been summed
        part = Part(placement=own, start=start, stop=stop)
        shard = Shard(rank=rank, where=where, record=record, part=part, factor=factor)
        self._parameters[lane if early else 0, key].append(shard)

    def _unsummed(self, key: RecordKey, name: str, where: RankCoordinates) -> str:
        """Return why a gradient is not yet the same sum in both runs; empty where it is."""
        if self._other_microbatch() or (self._lanes is Lanes.NONE and key.phase is not Phase.WGRAD):
            return OTHER_BATCHES
        if self._other_tokens(where):
            return _OTHER_TOKENS
        if self._experts is Experts.REDUCED and _EXPERT.fullmatch(name):
            return _OTHER_EXPERT_TOKENS
        return ""

    def _other_microbatch(self) -> bool:
        """Tell whether it is not known which microbatch of the other run one of this run's is."""
        return self._lanes is Lanes.NONE and self._numbering is None

    def _other_tokens(self, where: RankCoordinates) -> bool:
        """Tell whether the other run splits the sequence otherwise."""
        return self._lanes in (Lanes.NONE, Lanes.BATCHES) and where.cp_size > 1

    def _add_activation(self, rank: int, where: RankCoordinates, record: TensorRecord) -> None:
        lane, key = self._lanes.of(where), record.key
        place = _place_of(record, where)
        reason = self._unplaced(key, place, where)
        if reason:
            self._leave(lane, rank, record, key, reason)
        elif self._lanes is Lanes.ACTIVATIONS or isinstance(place, Unplaced):
            self._replicated[lane, key].append((rank, record))
        else:
            factor = 1.0
            if self._numbering is not None:
                key, factor = self._numbering.key(key, where), self._numbering.factor(key)
            part = Part(placement=place, start=0, stop=place.local_numel)
            shard = Shard(rank=rank, where=where, record=record, part=part, factor=factor)
            self._activations[lane, key].append(shard)

    def _unplaced(self, key: RecordKey, place: Placement | Unplaced, where: RankCoordinates) -> str:
        """Return why a module's tensor cannot be compared; empty where it can."""
        if key.fqn in self._spanning:
            return "no layout rule for what has parts on several stages"
        if self._experts is not Experts.MODULES and _EXPERT.fullmatch(key.fqn):
            return "no layout rule for modules of experts"
        if self._lanes is Lanes.ACTIVATIONS:
            return ""
        if self._other_microbatch():
            return OTHER_BATCHES
        if self._other_tokens(where):
            return "no layout rule for a sequence that is split over the context-parallel group"
        return place.reason if isinstance(place, Unplaced) else ""

    def _add_other(
        self,
        rank: int,
        where: RankCoordinates,
        record: TensorRecord,
        placements: Mapping[str, Placement | None],
    ) -> None:
        lane, key = self._lanes.shared(where), record.key
        whole = (
            (key.role is Role.LOSS and key.microbatch == NO_MICROBATCH)
            or (key.role is Role.GRAD_NORM and not key.slot)
            or key.role is Role.HYPERPARAMETER
        )
        reason = "" if whole else self._not_alike(key, where)
        if reason:
            self._leave(lane, rank, record, key, reason)
            return
        placement = placements.get(key.fqn)
        if placement is not None and placement.copy_of:
            key = replace(key, fqn=placement.copy_of)
        if key.role is Role.BATCH and self._chunks:
            key = replace(key, occurrence=0)  # each chunk of a rank reads the batch
        if not whole and self._numbering is not None:
            key = self._numbering.key(key, where)
        self._replicated[0 if whole else lane, key].append((rank, record))

    def _not_alike(self, key: RecordKey, where: RankCoordinates) -> str:
        """Return why a record that is of no parameter and no module cannot be compared; empty: it can."""
        if key.role not in _OF_BATCH or key.microbatch == NO_MICROBATCH:
            return f"no layout rule for {key.role.value} in {key.phase.value}"
        if self._other_microbatch():
            return OTHER_BATCHES
        return _OTHER_TOKENS if self._other_tokens(where) and key.role is Role.LOSS else ""

    def _leave(self, lane: int, rank: int, record: TensorRecord, key: RecordKey, reason: str) -> None:
        self.unruled.setdefault(key, reason)
        self._left[lane, key].append((rank, record))

    def merged(self) -> dict[int, list[Merged]]:
        """Return the canonical records by lane, in no order."""
        found: dict[int, list[Merged]] = defaultdict(list)
        for (lane, key), shards in self._parameters.items():
            found[lane].append(self._merger.merge(key, shards))
        for (lane, key), shards in self._activations.items():
            found[lane].append(self._merger.merge(key, shards, copies=True))
        for (lane, key), held in self._replicated.items():
            if len({record.digest.fingerprint for _, record in held}) > 1 and key.role in _OF_BATCH:
                self.unruled.setdefault(
                    key, f"no layout rule for a {key.role.value} that ranks see differently"
                )
            else:
                self._merger.check_replicas(key, held)
            found[lane].append(self._merger.single(key, held))
        for (lane, key), held in self._left.items():
            found[lane].append(self._merger.single(key, held))
        return found

    def notes(self, side: Side) -> Iterable[str]:
        """Say what was lost by merging."""
        if self._repeated:
            yield f"{self._repeated} records of the {side.value} repeat a key: only the last one is compared"


def _of_module(key: RecordKey) -> bool:
    """Tell whether a record is of a module's forward or backward, and not of a collective of nobody's."""
    return key.phase in _OF_MODULES and key.microbatch != NO_MICROBATCH and key.fqn != _NOBODYS


def _spanning(run: Run) -> frozenset[str]:
    """Return the names of modules of which several pipeline stages have a part: the decoder, the model."""
    stages: dict[str, set[int]] = defaultdict(set)
    for rank in run.ranks.values():
        for record in rank.records:
            if _of_module(record.key):
                stages[record.key.fqn].add(rank.coordinates.pp_rank)
    return frozenset(name for name, found in stages.items() if len(found) > 1)


def _splits_nothing(where: RankCoordinates) -> bool:
    """Tell whether in such a run every tensor is the canonical one."""
    return max(where.tp_size, where.cp_size, where.ep_size) == 1


def _placement(parameter: ParameterDeclaration, where: RankCoordinates) -> Placement | None:
    """Return where a parameter sits; one that nothing splits is whole also where its run does not say so."""
    other_experts = where.ep_size > 1 and _GROUPED.fullmatch(parameter.fqn)
    if parameter.placement is None and where.tp_size == 1 and not other_experts:
        return Placement(shape=parameter.shape)
    return parameter.placement


def _place_of(record: TensorRecord, where: RankCoordinates) -> Placement | Unplaced:
    """Return where an activation sits, or why that is not known."""
    if record.place is not None:
        return record.place
    if _splits_nothing(where):
        return Placement(shape=record.shape)
    return Unplaced(reason=f"no layout rule for {record.key.role.value} in {record.key.phase.value}")


def _canonical_key(key: RecordKey, name: str, placement: Placement) -> RecordKey:
    """Return the key without what the layout put into it."""
    if placement.copy_of and key.fqn == name:
        key = replace(key, fqn=placement.copy_of)
    if key.role is Role.REDUCED_GRAD and key.slot:
        key = replace(key, slot="")  # the range of a distributed optimizer
    return key


def _lane(
    run: Run, lane: int, ranks: Sequence[RankRecords], merged: Sequence[Merged], held: frozenset[str]
) -> CanonicalRank:
    first = ranks[0]
    parameters = _parameters(run) if any(rank.coordinates.tp_rank == 0 for rank in ranks) else ()
    ordered = sorted(merged, key=lambda item: item.order)
    records = tuple(replace(item.record, seq=seq) for seq, item in enumerate(ordered))
    further: dict[int, tuple[TensorRecord, ...]] = {}
    numbered = dict(enumerate(ordered))
    for seq, item in enumerate(ordered):
        copies = [replace(copy.record, seq=len(numbered) + n) for n, copy in enumerate(item.copies)]
        numbered.update((record.seq, copy) for record, copy in zip(copies, item.copies, strict=True))
        if copies:
            further[seq] = tuple(copies)
    return CanonicalRank(
        directory=first.directory,
        coordinates=replace(first.coordinates, rank=lane, tp_rank=0, pp_rank=0),
        records=records,
        steps=tuple(step for step in first.steps if all(step in rank.steps for rank in ranks)),
        parameters=parameters,
        elsewhere=frozenset(p.fqn for p in parameters) - held,
        microbatches=first.microbatches,
        complete=all(rank.complete for rank in ranks),
        findings=tuple(finding for rank in ranks for finding in rank.findings),
        run=run,
        merged=numbered,
        copies=further,
    )


def _parameters(run: Run) -> tuple[ParameterDeclaration, ...]:
    """Return the parameters of the canonical model, each once."""
    found: dict[str, ParameterDeclaration] = {}
    for rank in run.ranks.values():
        for parameter in rank.parameters:
            placement = _placement(parameter, rank.coordinates)
            if placement is None:
                found.setdefault(parameter.fqn, parameter)
            elif not placement.copy_of:
                found.setdefault(parameter.fqn, replace(parameter, shape=placement.shape, placement=None))
    return tuple(found.values())


def masters_of_one(baseline: Run, candidate: Run) -> dict[RecordKey, str]:
    """Return the keys of master parameters where one run alone has some: the other updates what it uses."""
    found = [
        {r.key for rank in run.ranks.values() for r in rank.records if r.key.role is Role.MASTER_PARAM}
        for run in (baseline, candidate)
    ]
    if all(found):
        return {}
    return dict.fromkeys(found[0] | found[1], "master parameters, which the other layout does not keep apart")


def unruled_notes(unruled: Mapping[RecordKey, str]) -> list[str]:
    """Say how many records have no layout rule, by reason."""
    counts = Counter(unruled.values())
    return [f"{count} records incomparable: {reason}" for reason, count in counts.most_common()]
