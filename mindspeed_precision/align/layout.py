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

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mindspeed_precision.align.groups import Groups
from mindspeed_precision.align.lanes import (
    Experts,
    Lanes,
    common_experts,
    common_lanes,
    each_token_once,
    layout_of,
)
from mindspeed_precision.align.microbatches import Numbering, common_numbering, sums_of_steps_known
from mindspeed_precision.align.places import Slot, of_collective, of_module, placement_of
from mindspeed_precision.align.sequences import doubt_of_order, sequences_known
from mindspeed_precision.align.shards import CanonicalRank, Merged
from mindspeed_precision.align.stages import ModelPart, Stages
from mindspeed_precision.dump.reader import RankRecords, Run
from mindspeed_precision.record.placement import PARAMETER_ROLES
from mindspeed_precision.records import (
    ParameterDeclaration,
    RecordKey,
    ReplicasDiffer,
    Role,
    Side,
    TensorRecord,
)


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
    apart = lanes in (Lanes.NONE, Lanes.BATCHES)
    numberings = common_numbering(baseline, candidate) if apart else (None, None)
    stages = Stages(baseline), Stages(candidate)
    if experts is Experts.REDUCED and all(map(each_token_once, layouts)):
        known = sums_of_steps_known(baseline, candidate, numberings, apart=apart)
        experts = Experts.STEPS if known else experts
    spanning = stages[0].spanning() | stages[1].spanning()
    sequences = sequences_known(baseline, candidate, apart=apart)
    one, two = (
        canonical(
            *(run, side),
            ends=parts.ends(spanning),
            lanes=lanes,
            experts=experts,
            spanning=spanning,
            numbering=numbering,
            sequences=sequences,
        )
        for run, side, numbering, parts in zip((baseline, candidate), Side, numberings, stages, strict=True)
    )
    if apart and (doubt := doubt_of_order(one.run, two.run)):
        one, two = _without_activations(one, doubt), _without_activations(two, doubt)
    unplaced = one.unplaced | two.unplaced
    return _without(one, unplaced), _without(two, unplaced)


def _without_activations(found: Canonical, reason: str) -> Canonical:
    """Leave out what modules receive and return; the products that are dW are none of it."""
    left = {
        record.key: reason
        for rank in found.run.ranks.values()
        for record in rank.records
        if of_module(record.key) and record.key.role not in PARAMETER_ROLES
    }
    return replace(found, unruled={**left, **found.unruled})


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
    sequences: bool = True,
    ends: Mapping[Slot, ModelPart] | None = None,
) -> Canonical:
    """Merge the ranks of a run.

    Args:
        run: the run.
        side: which one it is, for messages.
        lanes: what the other run splits as this one does, so that it can be compared.
        experts: what of an expert is the same in the other run.
        spanning: names of modules that have parts on several pipeline stages, in either run.
        numbering: the number of each microbatch in the whole batch, where both runs have the same one; None:
            they are not known to. Only asked for where the runs split the batch or the sequence otherwise.
        sequences: it is known where the parts of a sequence sit.
        ends: of modules with parts on several stages, which part's record is the whole module's.
    """
    groups = Groups(
        run,
        lanes=lanes,
        experts=experts,
        spanning=spanning,
        numbering=numbering,
        sequences=sequences,
        ends=ends,
    )
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
            placement = placement_of(parameter, rank.coordinates)
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


def collectives_of_one(baseline: Canonical, candidate: Canonical) -> dict[RecordKey, str]:
    """Return the keys of collectives without a rule that one run alone calls: there is nothing to compare."""
    one, two = (
        {r.key for rank in found.run.ranks.values() for r in rank.records if of_collective(r.key)}
        for found in (baseline, candidate)
    )
    unruled = baseline.unruled.keys() | candidate.unruled.keys()
    return dict.fromkeys((one ^ two) & unruled, "collectives that the other layout does not call")


def unruled_notes(unruled: Mapping[RecordKey, str]) -> list[str]:
    """Say how many records have no layout rule, by reason."""
    counts = Counter(unruled.values())
    return [f"{count} records incomparable: {reason}" for reason, count in counts.most_common()]
