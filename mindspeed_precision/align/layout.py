"""Runs of different parallel layouts: the records of all ranks become those of one canonical model.

What a rank holds of a parameter, and of everything that has one element for each of its elements (dW,
main_grad, optimizer state), is a shard of a canonical tensor, a replica of it, or both. Its placement says
which (``records.Placement``). Fingerprints, statistics and sketches of shards add up (``record.merge``), so
that no tensor is moved; replicas are checked to be replicas. Of a record without a rule nothing is said: it
is listed as incomparable, with the reason, and never compared.

What modules receive and return is placed where the runs split it alike and differ by pipeline stages alone:
it is then the same tensor on another rank, except of a module that has parts on several stages.

In the canonical run a "rank" is a lane (``Lanes``): one per data-parallel rank where both runs have as many
of them, since each then sees the same part of the batch; of each one per context-parallel rank where both
split the sequence alike; of each one per tensor-parallel rank where activations are placed; else one.
Parameters are in the first lane of those that see the same part of the batch.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump.reader import RankRecords, Run
from mindspeed_precision.record.merge import merge_digests
from mindspeed_precision.record.placement import canonical_index, parameter_of
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
)

_OF_MODULES = frozenset({Phase.FPROP, Phase.DGRAD, Phase.WGRAD})
_NOBODYS = "collective"
"""Name of collectives that belong to no module (``capture.collectives``); they are counted per rank."""

_BEFORE_REDUCTION = frozenset({Phase.WGRAD, Phase.ACCUMULATE})
_OF_BATCH = frozenset({Role.LOSS, Role.BATCH})
_OTHER_BATCHES = "the batch is split otherwise over the data-parallel ranks"
_OTHER_TOKENS = "not summed yet over the context-parallel group"
_OTHER_EXPERT_TOKENS = "an expert's tokens come from other ranks"
_EXPERT = re.compile(r".*\.experts(?:\..*)?")
"""Names of what has the tokens of all ranks over which experts are distributed."""
_SETTINGS = (
    ("transformer_config", "sequence_parallel"),
    ("transformer_config", "virtual_pipeline_model_parallel_size"),
    ("ddp_config", "use_distributed_optimizer"),
)
"""What places tensors beside the sizes, in the configuration that a run notes."""


def layouts_differ(baseline: Run, candidate: Run) -> bool:
    """Tell whether two runs place their tensors differently over ranks."""
    return layout_of(baseline) != layout_of(candidate)


def layout_of(run: Run) -> dict[str, object]:
    """Return what places a run's tensors: parallel sizes, and the settings that are known of it."""
    sizes: dict[str, object] = dict(_first(run).coordinates.sizes())
    config = run.manifest.get("config")
    for section, name in _SETTINGS:
        found = config.get(section) if isinstance(config, dict) else None
        value = found.get(name) if isinstance(found, dict) else None
        sizes[name] = value if value not in (False, 1) or value is True else None  # False and one chunk: off
    sizes["etp_size"] = _expert_tensor_size(config, _first(run).coordinates)
    return sizes


def _expert_tensor_size(config: object, where: RankCoordinates) -> int | None:
    """Return over how many ranks a weight of an expert is split; None for a model without experts."""
    transformer = config.get("transformer_config") if isinstance(config, dict) else None
    found = transformer if isinstance(transformer, dict) else {}
    size = found.get("expert_tensor_parallel_size")
    if not found.get("num_moe_experts"):
        return None
    return size if isinstance(size, int) else where.tp_size


def describe_layout(run: Run) -> str:
    """Return a layout as a person writes it: ``TP2 PP1 DP1, sequence parallel``."""
    layout = layout_of(run)
    sizes = [f"{name[:2].upper()}{layout[name]}" for name in ("tp_size", "pp_size", "dp_size")]
    sizes += [f"{name[:2].upper()}{layout[name]}" for name in ("cp_size", "ep_size") if layout[name] != 1]
    if layout["etp_size"] not in (None, layout["tp_size"]):
        sizes.append(f"ETP{layout['etp_size']}")
    words = {
        "sequence_parallel": "sequence parallel",
        "virtual_pipeline_model_parallel_size": f"{layout['virtual_pipeline_model_parallel_size']} chunks",
        "use_distributed_optimizer": "distributed optimizer",
    }
    return ", ".join([" ".join(sizes), *(text for name, text in words.items() if layout[name])])


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A rank's record of a part of a canonical tensor."""

    rank: int
    record: TensorRecord
    part: Part

    @property
    def place(self) -> tuple[object, ...]:
        """What replicas of one shard have in common."""
        return self.part.placement.blocks, self.part.start, self.part.stop


@dataclass(frozen=True, kw_only=True)
class CanonicalRank(RankRecords):
    """One lane of a canonical run: merged records, numbered anew.

    Attributes:
        run: the run as it was recorded, for elements.
        shards: by ``seq`` of a merged record, what it was merged from.
        sources: by ``seq`` of a record that is whole, the rank and the record that stand for it.
        held_by: by ``seq``, the ranks that hold it.
        elsewhere: parameters that no rank of this lane holds: experts of other lanes.
    """

    run: Run
    shards: Mapping[int, tuple[Shard, ...]] = field(default_factory=dict)
    sources: Mapping[int, tuple[int, TensorRecord]] = field(default_factory=dict)
    held_by: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()

    def holds(self, fqn: str) -> bool:
        """Tell whether a rank of this lane holds a declared parameter."""
        return fqn not in self.elsewhere

    def payload(self, record: TensorRecord) -> HostTensor:
        """Return the elements of a canonical record, put together from those of the ranks.

        Raises:
            DumpError: one of them has none, or its file does not fit.
        """
        if record.seq in self.sources:
            rank, own = self.sources[record.seq]
            return self.run.ranks[rank].payload(own)
        return assemble(self.run, self.shards[record.seq], record.shape)


def assemble(run: Run, shards: Sequence[Shard], shape: tuple[int, ...]) -> HostTensor:
    """Return a canonical tensor from its shards' elements.

    Args:
        run: the run that recorded them.
        shards: which together hold every element once.
        shape: canonical.

    Raises:
        DumpError: one of them has no elements, or its file does not fit.
    """
    pieces = [run.ranks[shard.rank].payload(shard.record) for shard in shards]
    bits = np.empty(int(np.prod(shape, dtype=np.int64)), pieces[0].bits.dtype)
    for shard, piece in zip(shards, pieces, strict=True):
        bits[canonical_index(shard.part)] = piece.bits.reshape(-1)
    return HostTensor(bits=bits.reshape(shape), dtype=pieces[0].dtype)


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
    lanes, experts = _common_lanes(*layouts), _common_experts(*layouts)
    spanning = _spanning(baseline) | _spanning(candidate)
    one, two = (
        canonical(run, side, lanes=lanes, experts=experts, spanning=spanning)
        for run, side in ((baseline, Side.BASELINE), (candidate, Side.CANDIDATE))
    )
    unplaced = one.unplaced | two.unplaced
    return _without(one, unplaced), _without(two, unplaced)


class Lanes(Enum):
    """What is kept apart in a canonical run; each includes the ones before it."""

    NONE = "none"
    BATCHES = "batches"
    """A lane per data-parallel rank."""
    TOKENS = "tokens"
    """Of each one per context-parallel rank."""
    ACTIVATIONS = "activations"
    """Of each one per tensor-parallel rank."""


def _common_lanes(one: Mapping[str, object], two: Mapping[str, object]) -> Lanes:
    """Tell what two layouts split alike: parts of the batch, of the sequence, and activations."""
    if one["dp_size"] != two["dp_size"]:
        return Lanes.NONE
    if one["cp_size"] != two["cp_size"]:
        return Lanes.BATCHES
    alike = all(one[name] == two[name] for name in ("tp_size", "sequence_parallel"))
    return Lanes.ACTIVATIONS if alike else Lanes.TOKENS


class Experts(Enum):
    """What of an expert is the same in two runs; each includes the ones before it."""

    REDUCED = "reduced"
    """What is reduced alone."""
    SUMS = "sums"
    """Its gradients before: it has the same tokens in each lane."""
    MODULES = "modules"
    """What its modules receive and return."""


def _common_experts(one: Mapping[str, object], two: Mapping[str, object]) -> Experts:
    """Tell what two layouts have alike of an expert.

    The ranks that experts are distributed over, and that an expert is split over, follow each other, first
    within a tensor-parallel group. Where they are one such group an expert has the tokens of one lane.
    """
    if one["etp_size"] is None or two["etp_size"] is None:
        return Experts.MODULES  # there are none
    spread = [_size(layout, "ep_size") * _size(layout, "etp_size") for layout in (one, two)]
    tensor = [_size(layout, "tp_size") for layout in (one, two)]
    alike = all(one[name] == two[name] for name in ("ep_size", "etp_size"))
    if alike and _common_lanes(one, two) is Lanes.ACTIVATIONS and spread[0] >= tensor[0]:
        return Experts.MODULES
    return Experts.SUMS if spread == tensor else Experts.REDUCED


def _size(layout: Mapping[str, object], name: str) -> int:
    size = layout[name]
    return size if isinstance(size, int) else 1


def _without(found: Canonical, unplaced: frozenset[str]) -> Canonical:
    """Leave out of the declarations what one of the runs cannot place."""
    ranks: dict[int, RankRecords] = {
        number: replace(rank, parameters=tuple(p for p in rank.parameters if p.fqn not in unplaced))
        for number, rank in found.run.ranks.items()
    }
    return replace(found, run=replace(found.run, ranks=ranks))


def _first(run: Run) -> RankRecords:
    return next(iter(run.ranks.values()))


def canonical(
    run: Run,
    side: Side,
    *,
    lanes: Lanes,
    experts: Experts = Experts.MODULES,
    spanning: frozenset[str] = frozenset(),
) -> Canonical:
    """Merge the ranks of a run.

    Args:
        run: the run.
        side: which one it is, for messages.
        lanes: what the other run splits as this one does, so that it can be compared.
        experts: what of an expert is the same in the other run.
        spanning: names of modules that have parts on several pipeline stages, in either run.
    """
    groups = _Groups(run, lanes=lanes, experts=experts, spanning=spanning)
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


@dataclass(frozen=True, kw_only=True)
class _Merged:
    """A canonical record before it has a number."""

    order: tuple[object, ...]
    record: TensorRecord
    shards: tuple[Shard, ...] = ()
    source: tuple[int, TensorRecord] | None = None
    held_by: tuple[int, ...] = ()


class _Groups:
    """The records of all ranks, sorted by the canonical record that they are part of."""

    def __init__(self, run: Run, *, lanes: Lanes, experts: Experts, spanning: frozenset[str]) -> None:
        self._run = run
        self._lanes = lanes
        self._experts = experts
        self._spanning = spanning
        self._chunks = bool(layout_of(run)["virtual_pipeline_model_parallel_size"])
        self.members: dict[int, list[int]] = defaultdict(list)
        for number, rank in run.ranks.items():
            self.members[self._lane(rank.coordinates)].append(number)
        self._shards: dict[tuple[int, RecordKey], list[Shard]] = defaultdict(list)
        self._replicated: dict[tuple[int, RecordKey], list[tuple[int, TensorRecord]]] = defaultdict(list)
        self._left: dict[tuple[int, RecordKey], list[tuple[int, TensorRecord]]] = defaultdict(list)
        self.held: dict[int, set[str]] = defaultdict(set)
        self._repeated = 0
        self.unruled: dict[RecordKey, str] = {}
        self.unplaced: set[str] = set()
        self.replicas: list[ReplicasDiffer] = []

    def _lane(self, where: RankCoordinates) -> int:
        if self._lanes is Lanes.NONE:
            return 0
        if self._lanes is Lanes.BATCHES:
            return where.dp_rank
        sequence = where.dp_rank * where.cp_size + where.cp_rank
        return sequence * where.tp_size + where.tp_rank if self._lanes is Lanes.ACTIVATIONS else sequence

    def add(self, number: int, rank: RankRecords) -> None:
        """Sort in the records of one rank."""
        placements = {p.fqn: _placement(p, rank.coordinates) for p in rank.parameters}
        self.unplaced |= {name for name, placement in placements.items() if placement is None}
        last = {record.key: record for record in rank.records}
        self._repeated += len(rank.records) - len(last)
        own = self._lane(rank.coordinates)
        lane = self._lane(replace(rank.coordinates, tp_rank=0))
        self.held[lane] |= {placed.copy_of or name if placed else name for name, placed in placements.items()}
        for record in last.values():
            name = parameter_of(record.key, placements)
            if name is not None:
                self._add_shard(number, lane, record, placements[name], name)
            elif self._lanes is Lanes.ACTIVATIONS and _of_module(record.key):
                self._add_activation(number, own, record)
            else:
                self._add_other(number, lane, record, placements)

    def _add_shard(
        self, rank: int, lane: int, record: TensorRecord, placement: Placement | None, name: str
    ) -> None:
        key = record.key
        early = key.phase in _BEFORE_REDUCTION
        if placement is None:
            self._leave(lane, rank, record, key, f"no layout rule for {name}")
            return
        key = _canonical_key(key, name, placement)
        unsummed = self._unsummed(name, placement, rank) if early else ""
        if unsummed:
            self._leave(lane, rank, record, key, unsummed)
        else:
            start, stop = record.part or (0, placement.local_numel)
            numbered = record.part is not None or placement.whole
            if record.numel != stop - start or not numbered:
                self._leave(lane, rank, record, key, "its elements are not numbered as the parameter's are")
                return
            shard = Shard(rank=rank, record=record, part=Part(placement=placement, start=start, stop=stop))
            self._shards[lane if early else 0, key].append(shard)

    def _unsummed(self, name: str, placement: Placement, rank: int) -> str:
        """Return why a gradient is not yet the same sum in both runs; empty where it is."""
        if self._lanes is Lanes.NONE:
            return _OTHER_BATCHES
        if self._lanes is Lanes.BATCHES and self._run.ranks[rank].coordinates.cp_size > 1:
            return _OTHER_TOKENS
        if self._experts is Experts.REDUCED and _EXPERT.fullmatch(name):
            return _OTHER_EXPERT_TOKENS
        return f"not summed yet over {placement.partial}" if placement.partial else ""

    def _add_activation(self, rank: int, lane: int, record: TensorRecord) -> None:
        if record.key.fqn in self._spanning:
            self._leave(lane, rank, record, record.key, "no layout rule for what has parts on several stages")
        elif self._experts is not Experts.MODULES and _EXPERT.fullmatch(record.key.fqn):
            self._leave(lane, rank, record, record.key, "no layout rule for modules of experts")
        else:
            self._replicated[lane, record.key].append((rank, record))

    def _add_other(
        self, rank: int, lane: int, record: TensorRecord, placements: Mapping[str, Placement | None]
    ) -> None:
        key = record.key
        whole = (
            (key.role is Role.LOSS and key.microbatch == NO_MICROBATCH)
            or (key.role is Role.GRAD_NORM and not key.slot)
            or key.role is Role.HYPERPARAMETER
        )
        reason = "" if whole else self._not_alike(key, rank)
        if reason:
            self._leave(lane, rank, record, key, reason)
            return
        placement = placements.get(key.fqn)
        if placement is not None and placement.copy_of:
            key = replace(key, fqn=placement.copy_of)
        if key.role is Role.BATCH and self._chunks:
            key = replace(key, occurrence=0)  # each chunk of a rank reads the batch
        self._replicated[0 if whole else lane, key].append((rank, record))

    def _not_alike(self, key: RecordKey, rank: int) -> str:
        """Return why a record that is of no parameter and no module cannot be compared; empty: it can."""
        if key.role not in _OF_BATCH or key.microbatch == NO_MICROBATCH:
            return f"no layout rule for {key.role.value} in {key.phase.value}"
        if self._lanes is Lanes.NONE:
            return _OTHER_BATCHES
        tokens = self._lanes is Lanes.BATCHES and self._run.ranks[rank].coordinates.cp_size > 1
        return _OTHER_TOKENS if tokens and key.role is Role.LOSS else ""

    def _leave(self, lane: int, rank: int, record: TensorRecord, key: RecordKey, reason: str) -> None:
        self.unruled.setdefault(key, reason)
        self._left[lane, key].append((rank, record))

    def merged(self) -> dict[int, list[_Merged]]:
        """Return the canonical records by lane, in no order."""
        found: dict[int, list[_Merged]] = defaultdict(list)
        for (lane, key), shards in self._shards.items():
            found[lane].append(self._merge(key, shards))
        for (lane, key), held in self._replicated.items():
            if len({record.digest.fingerprint for _, record in held}) > 1 and key.role in _OF_BATCH:
                self.unruled.setdefault(
                    key, f"no layout rule for a {key.role.value} that ranks see differently"
                )
            else:
                self._check_replicas(key, held)
            found[lane].append(self._single(key, held))
        for (lane, key), held in self._left.items():
            found[lane].append(self._single(key, held))
        return found

    def _merge(self, key: RecordKey, shards: list[Shard]) -> _Merged:
        places: dict[tuple[object, ...], list[Shard]] = defaultdict(list)
        for shard in shards:
            places[shard.place].append(shard)
        for replicas in places.values():
            self._check_replicas(key, [(shard.rank, shard.record) for shard in replicas])
        chosen = tuple(replicas[0] for replicas in places.values())
        shape = chosen[0].part.placement.shape
        whole = replace(chosen[0].record, key=key, shape=shape)
        if sum(shard.record.numel for shard in chosen) != whole.numel:
            self.unruled.setdefault(key, "not every rank that holds a part of it recorded it")
            return self._single(key, [(shard.rank, shard.record) for shard in shards])
        ranks = tuple(sorted({shard.rank for shard in shards}))
        order = self._order(chosen[0].rank, chosen[0].record)
        if len(chosen) == 1:
            source = (chosen[0].rank, chosen[0].record)
            # a range of a distributed optimizer is flat on the rank, and is read as that
            kept = whole if chosen[0].record.shape == shape else replace(whole, layout=None)
            if kept.shape == chosen[0].record.shape:
                return _Merged(order=order, record=replace(kept, part=None), source=source, held_by=ranks)
        record = replace(
            whole,
            layout=None,
            part=None,
            digest=merge_digests(
                [shard.record.digest for shard in chosen], [shard.record.numel for shard in chosen]
            ),
            payload="shards" if all(shard.record.payload for shard in chosen) else None,
        )
        return _Merged(order=order, record=record, shards=chosen, held_by=ranks)

    def _single(self, key: RecordKey, held: Sequence[tuple[int, TensorRecord]]) -> _Merged:
        """Let the first rank stand for all that have a record."""
        rank, record = held[0]
        return _Merged(
            order=self._order(rank, record),
            record=replace(record, key=key, part=None),
            source=(rank, record),
            held_by=tuple(sorted({number for number, _ in held})),
        )

    def _order(self, rank: int, record: TensorRecord) -> tuple[object, ...]:
        """Place a record in the execution of the whole model: forward through the stages, then backward."""
        stage, key = self._run.ranks[rank].coordinates.pp_rank, record.key
        late = key.phase not in _IN_MICROBATCH or (key.phase, key.microbatch) == (Phase.LOSS, NO_MICROBATCH)
        forward = key.phase not in (Phase.DGRAD, *_BEFORE_REDUCTION)
        depth = 0 if late else stage if forward else -stage
        return key.step, late, key.microbatch, not forward, depth, record.seq

    def _check_replicas(self, key: RecordKey, held: Sequence[tuple[int, TensorRecord]]) -> None:
        by_bits: dict[int, list[int]] = defaultdict(list)
        for rank, record in held:
            by_bits[record.digest.fingerprint].append(rank)
        if len(by_bits) > 1:
            ranks = tuple(tuple(sorted(group)) for group in by_bits.values())
            self.replicas.append(ReplicasDiffer(key=key, side=Side.BASELINE, ranks=ranks))

    def notes(self, side: Side) -> Iterable[str]:
        """Say what was lost by merging."""
        if self._repeated:
            yield f"{self._repeated} records of the {side.value} repeat a key: only the last one is compared"


_IN_MICROBATCH = frozenset(
    {Phase.INIT, Phase.BATCH, Phase.FPROP, Phase.LOSS, Phase.DGRAD, *_BEFORE_REDUCTION}
)


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


def _placement(parameter: ParameterDeclaration, where: RankCoordinates) -> Placement | None:
    """Return where a parameter sits; one that nothing splits is whole also where its run does not say so."""
    if parameter.placement is None and where.tp_size == 1:
        return Placement(shape=parameter.shape)
    return parameter.placement


def _canonical_key(key: RecordKey, name: str, placement: Placement) -> RecordKey:
    """Return the key without what the layout put into it."""
    if placement.copy_of and key.fqn == name:
        key = replace(key, fqn=placement.copy_of)
    if key.role is Role.REDUCED_GRAD and key.slot:
        key = replace(key, slot="")  # the range of a distributed optimizer
    return key


def _lane(
    run: Run, lane: int, ranks: Sequence[RankRecords], merged: Sequence[_Merged], held: frozenset[str]
) -> CanonicalRank:
    first = ranks[0]
    parameters = _parameters(run) if any(rank.coordinates.tp_rank == 0 for rank in ranks) else ()
    ordered = sorted(merged, key=lambda item: item.order)
    records = tuple(replace(item.record, seq=seq) for seq, item in enumerate(ordered))
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
        shards={seq: item.shards for seq, item in enumerate(ordered) if item.shards},
        sources={seq: item.source for seq, item in enumerate(ordered) if item.source},
        held_by={seq: item.held_by for seq, item in enumerate(ordered)},
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
