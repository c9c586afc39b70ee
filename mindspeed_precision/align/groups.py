"""The records of all ranks of a run, sorted by the canonical record that they are part of.

A record that cannot be is left with the reason.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from mindspeed_precision.align.lanes import Experts, Lanes
from mindspeed_precision.align.merging import BEFORE_REDUCTION, Merger
from mindspeed_precision.align.microbatches import OTHER_BATCHES, Numbering
from mindspeed_precision.align.places import (
    Slot,
    canonical_key,
    of_module,
    place_of,
    placement_of,
    slot_of,
    summed,
)
from mindspeed_precision.align.reports import SUMMED, report_of, summed_reports
from mindspeed_precision.align.shards import Merged, Shard, held_alone
from mindspeed_precision.align.stages import ModelPart, Stages
from mindspeed_precision.align.step_sums import INCOMPLETE, StepSums
from mindspeed_precision.counting import agree, count
from mindspeed_precision.dump.reader import RankRecords, Run
from mindspeed_precision.record.placement import CONTEXT_GROUP, parameter_of, summed_over
from mindspeed_precision.records import (
    NO_MICROBATCH,
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

_OF_BATCH = frozenset({Role.LOSS, Role.BATCH})
_NO_SEQUENCE = "no layout rule for a sequence that is split over the context-parallel group"
_OTHER_TOKENS = "not summed yet over the context-parallel group"
_OTHER_EXPERT_TOKENS = "an expert's tokens come from other ranks"
_EXPERT = re.compile(r".*\.experts(?:\..*)?")
"""Names of what has the tokens of all ranks over which experts are distributed."""


class Groups:
    """The records of all ranks, sorted by the canonical record that they are part of."""

    def __init__(
        self,
        run: Run,
        *,
        lanes: Lanes,
        experts: Experts,
        spanning: frozenset[str],
        numbering: Numbering | None,
        sequences: bool = True,
        ends: Mapping[Slot, ModelPart] | None = None,
    ) -> None:
        self._lanes = lanes
        self._experts = experts
        self._spanning = spanning
        self._numbering = numbering
        self._sequences = sequences
        self._ends = ends or {}
        self.members: dict[int, list[int]] = defaultdict(list)
        for number, rank in run.ranks.items():
            self.members[lanes.of(rank.coordinates)].append(number)
        self._stages = Stages(run)
        self._summed_reports = summed_reports(run) if lanes is Lanes.NONE else frozenset()
        self._merger = Merger(run, self._stages)
        self._parameters: dict[tuple[int, RecordKey], list[Shard]] = defaultdict(list)
        self._activations: dict[tuple[int, RecordKey], list[Shard]] = defaultdict(list)
        self._replicated: dict[tuple[int, RecordKey], list[tuple[int, TensorRecord]]] = defaultdict(list)
        self._left: dict[tuple[int, RecordKey], list[tuple[int, TensorRecord]]] = defaultdict(list)
        self._sums = StepSums(run)
        self.held: dict[int, set[str]] = defaultdict(set)
        self._passed_on = self._repeated = 0
        self.unruled = self._merger.unruled
        self.unplaced: set[str] = set()

    @property
    def replicas(self) -> list[ReplicasDiffer]:
        """Copies that differ, in execution order."""
        return [found for _, found in sorted(self._merger.replicas, key=lambda item: item[0])]

    @property
    def first_difference(self) -> tuple[object, ...]:
        """When the first copy that differs is seen, in the execution of the whole model; empty for none."""
        return min((order for order, _ in self._merger.replicas), default=())

    @property
    def compared(self) -> int:
        """How many tensors have copies that were compared with each other."""
        return self._merger.compared

    def add(self, number: int, rank: RankRecords) -> None:
        """Sort in the records of one rank."""
        placements = {p.fqn: placement_of(p, rank.coordinates) for p in rank.parameters}
        self.unplaced |= {name for name, placement in placements.items() if placement is None}
        last = {record.key: record for record in rank.records}
        self._repeated += len(rank.records) - len(last)
        lane = self._lanes.shared(rank.coordinates)
        self.held[lane] |= {placed.copy_of or name if placed else name for name, placed in placements.items()}
        for record in last.values():
            if record.key.role in (Role.RESIDUAL, Role.BUFFER):
                continue  # for `check`: of one run alone, or of a place that is not known
            name = parameter_of(record.key, placements)
            if name is not None:
                self._add_parameter(number, rank.coordinates, record, placements[name], name)
            elif of_module(record.key):
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
        lane, (key, factor) = self._lanes.shared(where), self._numbered(record.key, where)
        elsewhere = self._from_elsewhere(name)
        if elsewhere:
            key = record.key  # its tokens are of no one microbatch of the whole batch
        early = key.phase in BEFORE_REDUCTION
        if placement is None:
            self._leave(lane, rank, record, key, f"no layout rule for {name}")
            return
        own = summed(placement, key, name) if early else replace(placement, partial="")
        if early and not elsewhere and self._contexts_together(where):
            own = summed_over(own, CONTEXT_GROUP)
        key = canonical_key(key, name, placement)
        unsummed = self._unsummed(key, name, where) if early else ""
        start, stop = record.part or (0, placement.local_numel)
        numbered = record.part is not None or placement.whole
        if record.numel != stop - start or not numbered:
            self._leave(lane, rank, record, key, "its elements are not numbered as the parameter's are")
            return
        part = Part(placement=own, start=start, stop=stop)
        shard = Shard(rank=rank, where=where, record=record, part=part, factor=factor)
        if unsummed:
            self._leave(lane, rank, record, key, unsummed)
            if elsewhere and self._experts is Experts.STEPS:
                self._sums.add(key, shard, name)
            return
        self._parameters[lane if early else 0, key].append(shard)

    def _numbered(self, key: RecordKey, where: RankCoordinates) -> tuple[RecordKey, float]:
        """Return the key with the microbatch's number in the whole batch, and the record's factor."""
        if self._numbering is None or key.microbatch == NO_MICROBATCH:
            return key, 1.0
        return self._numbering.key(key, where), self._numbering.factor(key)

    def _unsummed(self, key: RecordKey, name: str, where: RankCoordinates) -> str:
        """Return why a gradient is not yet the same sum in both runs; empty where it is."""
        if self._other_microbatch(key) or (self._lanes is Lanes.NONE and key.phase is not Phase.WGRAD):
            return OTHER_BATCHES
        if self._contexts_together(where) and not self._known(key):
            return _OTHER_TOKENS
        return _OTHER_EXPERT_TOKENS if self._from_elsewhere(name) else ""

    def _from_elsewhere(self, name: str) -> bool:
        """Tell whether a parameter is of an expert to which the runs send the tokens of other ranks."""
        return self._experts in (Experts.REDUCED, Experts.STEPS) and _EXPERT.fullmatch(name) is not None

    def _other_microbatch(self, key: RecordKey) -> bool:
        """Tell whether it is not known what of the other run a record of one microbatch is."""
        return self._lanes is Lanes.NONE and not self._known(key)

    def _known(self, key: RecordKey) -> bool:
        """Tell whether a record of one microbatch can be made as the other run's."""
        return self._numbering is not None and self._numbering.knows(key)

    def _contexts_together(self, where: RankCoordinates) -> bool:
        """Tell whether the parts of a sequence are put together: the other run splits it otherwise."""
        return self._lanes in (Lanes.NONE, Lanes.BATCHES) and where.cp_size > 1

    def _add_activation(self, rank: int, where: RankCoordinates, record: TensorRecord) -> None:
        lane, (key, factor) = self._lanes.of(where), self._numbered(record.key, where)
        end = self._ends.get(slot_of(key))
        if end is not None and end != self._stages.part(rank, key):  # what one part gives to the next
            self._passed_on += 1
            return
        if end is not None and self._stages.chunks > 1:
            key = replace(key, occurrence=0)  # the nth call of its name is that of the nth chunk
        place = place_of(record, where)
        reason = self._unplaced(key, place, where)
        if reason:
            self._leave(lane, rank, record, key, reason)
        elif self._lanes is Lanes.ACTIVATIONS or isinstance(place, Unplaced):
            self._replicated[lane, key].append((rank, record))
        else:
            part = Part(placement=place, start=0, stop=place.local_numel)
            shard = Shard(rank=rank, where=where, record=record, part=part, factor=factor)
            self._activations[lane, key].append(shard)

    def _unplaced(self, key: RecordKey, place: Placement | Unplaced, where: RankCoordinates) -> str:
        """Return why a module's tensor cannot be compared; empty where it can."""
        if key.fqn in self._spanning and slot_of(key) not in self._ends:
            return "no layout rule for what has parts on several stages"
        if _EXPERT.fullmatch(key.fqn) and not self._same_tokens(where):
            return "no layout rule for modules of experts"
        if self._lanes is Lanes.ACTIVATIONS:
            return ""
        if self._other_microbatch(key):
            return OTHER_BATCHES
        if where.cp_size > 1 and not self._sequences:
            return _NO_SEQUENCE
        if self._contexts_together(where) and not self._known(key) and key.phase is not Phase.FPROP:
            return _OTHER_TOKENS
        return place.reason if isinstance(place, Unplaced) else ""

    def _same_tokens(self, where: RankCoordinates) -> bool:
        """Tell whether an expert is given the same tokens in both runs, in an order that is known."""
        placed = self._lanes is not Lanes.ACTIVATIONS and not self._contexts_together(where)
        return self._experts is Experts.MODULES or (self._experts is Experts.SUMS and placed)

    def _add_other(
        self,
        rank: int,
        where: RankCoordinates,
        record: TensorRecord,
        placements: Mapping[str, Placement | None],
    ) -> None:
        lane, (key, _) = self._lanes.shared(where), self._numbered(record.key, where)
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
        if key.role is Role.BATCH and self._stages.chunks > 1:
            key = replace(key, occurrence=0)  # each chunk of a rank reads the batch
        self._replicated[0 if whole else lane, key].append((rank, record))

    def _not_alike(self, key: RecordKey, where: RankCoordinates) -> str:
        """Return why a record that is of no parameter and no module cannot be compared; empty: it can."""
        if key.role not in _OF_BATCH or key.microbatch == NO_MICROBATCH:
            return f"no layout rule for {key.role.value} in {key.phase.value}"
        if self._other_microbatch(key):
            return OTHER_BATCHES
        if key.role is Role.LOSS and report_of(key) in self._summed_reports:
            return SUMMED
        return _OTHER_TOKENS if self._contexts_together(where) and key.role is Role.LOSS else ""

    def _leave(self, lane: int, rank: int, record: TensorRecord, key: RecordKey, reason: str) -> None:
        self.unruled.setdefault(key, reason)
        self._left[lane, key].append((rank, record))

    def merged(self) -> dict[int, list[Merged]]:
        """Return the canonical records by lane, in no order."""
        found: dict[int, list[Merged]] = defaultdict(list)
        for (lane, key), shards in self._parameters.items():
            found[lane].append(self._merger.merge(key, shards))
        found[0] += [self._merger.merge(key, terms) for key, terms in self._sums]
        self.unruled.update(dict.fromkeys(self._sums.incomplete, INCOMPLETE))
        apart = self._lanes is Lanes.TOKENS  # a lane has its context-parallel rank's tokens alone
        for (lane, key), shards in self._activations.items():
            own = held_alone(shards) if apart and shards[0].where.cp_size > 1 else shards
            found[lane].append(self._merger.merge(key, own, copies=True))
        for (lane, key), held in self._replicated.items():
            self._compare_whole(key, held)
            found[lane].append(self._merger.single(key, held))
        for (lane, key), held in self._left.items():
            found[lane].append(self._merger.single(key, held))
        return found

    def compare_copies(self) -> None:
        """Compare the copies alone; ``replicas`` and ``compared`` say what was found."""
        for (_, key), shards in (*self._parameters.items(), *self._activations.items()):
            self._merger.compare(key, shards)
        for (_, key), held in self._replicated.items():
            self._compare_whole(key, held)

    def _compare_whole(self, key: RecordKey, held: Sequence[tuple[int, TensorRecord]]) -> None:
        if len({record.digest.fingerprint for _, record in held}) > 1 and key.role in _OF_BATCH:
            self.unruled.setdefault(key, f"no layout rule for a {key.role.value} that ranks see differently")
        else:
            self._merger.check_replicas(key, held)

    def notes(self, side: Side) -> Iterable[str]:
        """Say what was lost by merging."""
        if self._repeated:
            repeat = agree(self._repeated, "repeat")
            records = count(self._repeated, "record")
            yield f"{records} of the {side.value} {repeat} a key: only the last one is compared"
        if self._passed_on:
            told = "are what a pipeline stage gives to another: not compared"
            yield f"{count(self._passed_on, 'record')} of the {side.value} {told}"
