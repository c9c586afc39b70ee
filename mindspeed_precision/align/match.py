"""Match the records of two runs on their keys: rank by rank, or canonical ones where layouts differ."""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from collections.abc import Mapping as Mapping_
from dataclasses import dataclass, field, replace
from pathlib import Path

from mindspeed_precision.align.compatible import (
    common_ranks,
    common_steps,
    different_frameworks,
    foreign_notes,
    numbers_text,
    require_same_model,
)
from mindspeed_precision.align.conventions import with_conventions
from mindspeed_precision.align.definition import of_one_definition
from mindspeed_precision.align.forced import forced_note, forced_steps
from mindspeed_precision.align.lanes import describe_layouts, layouts_differ
from mindspeed_precision.align.layout import (
    canonical_runs,
    collectives_of_one,
    masters_of_one,
    unruled_notes,
)
from mindspeed_precision.align.mapping import Drop, Mapping, renamed
from mindspeed_precision.align.shards import CanonicalRank
from mindspeed_precision.align.stand_ins import StandIns
from mindspeed_precision.align.start import common_start, initial
from mindspeed_precision.align.vocabulary import Padding, padding_of, with_common_rows
from mindspeed_precision.dump.reader import RankRecords, Run
from mindspeed_precision.records import (
    INIT_STEP,
    SCHEDULE,
    Pair,
    Phase,
    RecordKey,
    ReplicasDiffer,
    Role,
    Side,
    TensorRecord,
    Unmatched,
)

_OF_MODULES = (Phase.FPROP, Phase.DGRAD, Phase.WGRAD)

CLOSEST = 3
"""How many candidates an unmatched record is shown with."""

_NAMED_CLOSEST = 200
"""For so many unmatched records closest candidates are searched: beyond, the cause is not a misspelt name."""


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """What belongs together.

    Attributes:
        baseline: the run to agree with, under the names that were aligned.
        candidate: the run that is examined, likewise.
        ranks: compared ranks, ascending.
        steps: compared training steps, ascending.
        pairs: by rank, then in the baseline's execution order.
        unmatched: records of a compared step and rank that have no partner.
        notes: what was left out, and why.
        unruled: records that cannot be compared across the layouts of the runs, with the reason.
        replicas: copies of one tensor on several ranks that differ; looked for where layouts differ.
        layouts: the layouts of baseline and candidate in words, where they differ.
        padding: how the vocabulary is padded, where the runs do it otherwise.
        forced: the compared steps that both runs begin with one state, which one of them took from the other.
        stand_ins: for which ranks others stand.
    """

    baseline: Run
    candidate: Run
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    pairs: tuple[Pair, ...]
    unmatched: tuple[Unmatched, ...]
    notes: tuple[str, ...]
    unruled: Mapping_[RecordKey, str] = field(default_factory=dict)
    replicas: tuple[ReplicasDiffer, ...] = ()
    layouts: tuple[str, ...] = ()
    padding: Padding | None = None
    forced: frozenset[int] = frozenset()
    stand_ins: StandIns = field(default_factory=StandIns)


def align(
    baseline: Run,
    candidate: Run,
    mappings: Sequence[Mapping] = (),
    *,
    stand_ins: StandIns | None = None,
) -> Alignment:
    """Pair the records of two runs.

    Only steps that are whole on all ranks of both runs are compared. Records of recomputed activations that
    one run alone has are no loss: recomputation is a setting. The runs may keep different levels of detail.
    The random states of two frameworks are of different generators and are not paired.

    Args:
        baseline: a run.
        candidate: another.
        mappings: names and conventions that differ.
        stand_ins: for which ranks those of the runs stand; None: for themselves.

    Raises:
        IncomparableError: the parallel layouts or the models differ, no rank or step is common, a step
            began with the state of a third run, or the fingerprints are of two definitions and elements were
            not kept.
        ConfigError: a mapping speaks of neither run, or gives two records one name.
    """
    recorded = baseline, candidate
    stand_ins = stand_ins or StandIns()
    of_side: dict[Side, list[Mapping]] = {side: [] for side in Side}
    for mapping in mappings:
        of_side[mapping.side_of(baseline, candidate)].append(mapping)
    baseline, candidate, definition_notes = of_one_definition(baseline, candidate)
    baseline, notes = renamed(baseline, of_side[Side.BASELINE], Side.BASELINE)
    candidate, candidate_notes = renamed(candidate, of_side[Side.CANDIDATE], Side.CANDIDATE)
    across = _Across.layouts(baseline, candidate)
    baseline, candidate = across.baseline, across.candidate
    ranks, rank_notes = common_ranks(baseline, candidate)
    require_same_model(baseline, candidate, ranks)
    steps, step_notes = common_steps(baseline, candidate, ranks)
    forced = forced_steps(*recorded, steps)
    start = common_start(baseline, candidate, ranks, reloaded=steps[0] if steps[0] in forced else None)
    foreign = different_frameworks(baseline, candidate)
    pairs: list[Pair] = []
    unmatched: list[Unmatched] = []
    left = _LeftOut()
    for rank in ranks:
        rank_notes += _repeated(baseline.ranks[rank], candidate.ranks[rank])
        one, two = (
            across.ruled(stand_ins.held(rank, _by_key(run.ranks[rank], steps, began)))
            for run, began in ((baseline, start.baseline), (candidate, start.candidate))
        )
        left.weight = stand_ins.alike(rank)
        one, two = left.without_random(one, foreign), left.without_random(two, foreign)
        found = across.with_holders(rank, across.with_copies(rank, across.alike(_pairs(rank, one, two))))
        pairs += with_conventions(found, of_side, {Side.BASELINE: one, Side.CANDIDATE: two})
        for side, mine, other in ((Side.BASELINE, one, two), (Side.CANDIDATE, two, one)):
            alone = [record for key, record in mine.items() if key not in other]
            rest = left.expected(side, alone, of_side[side], foreign)
            unmatched += _unmatched(side, rank, rest, other)
    notes += [
        *candidate_notes,
        *definition_notes,
        *across.notes,
        *foreign_notes(baseline, candidate),
        *rank_notes,
        *step_notes,
    ]
    notes += filter(None, [forced_note(*recorded, forced, numbers_text(sorted(forced))), start.note])
    return Alignment(
        baseline=baseline,
        candidate=candidate,
        ranks=tuple(ranks),
        steps=tuple(steps),
        pairs=tuple(pairs),
        unmatched=tuple(unmatched),
        notes=(*notes, *left.notes(of_side), *unruled_notes(across.left)),
        unruled=across.left,
        replicas=tuple(r for r in across.replicas if r.key.step == INIT_STEP or r.key.step in steps),
        layouts=across.names,
        padding=across.padding,
        forced=forced,
        stand_ins=stand_ins,
    )


@dataclass(frozen=True, kw_only=True)
class _Across:
    """Two runs over the same ranks: as they are, or as canonical ones where their layouts differ.

    Attributes:
        baseline: likewise.
        candidate: likewise.
        unruled: records of either run that have no layout rule, with the reason.
        left: those of them that were met in a compared step.
        replicas: replicas that differ.
        names: the two layouts in words; none where they are equal.
        padding: how the vocabulary is padded, where the runs do it otherwise.
        notes: what a reader must know.
    """

    baseline: Run
    candidate: Run
    unruled: Mapping_[RecordKey, str] = field(default_factory=dict)
    left: dict[RecordKey, str] = field(default_factory=dict)
    replicas: tuple[ReplicasDiffer, ...] = ()
    names: tuple[str, ...] = ()
    padding: Padding | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def layouts(cls, baseline: Run, candidate: Run) -> _Across:
        if not layouts_differ(baseline, candidate):
            return cls(baseline=baseline, candidate=candidate)
        names = describe_layouts(baseline, candidate)
        one, two = canonical_runs(baseline, candidate)
        padding = padding_of(one.run, two.run)
        if padding is not None:
            one, two = with_common_rows(one, padding), with_common_rows(two, padding)
        unruled = {
            **masters_of_one(one.run, two.run),
            **one.unruled,
            **two.unruled,
            **collectives_of_one(one, two),
        }
        note = f"the baseline ran as {names[0]}, the candidate as {names[1]}: shards are put together"
        return cls(
            baseline=one.run,
            candidate=two.run,
            unruled=unruled,
            replicas=(*one.replicas, *two.replicas),
            names=names,
            padding=padding,
            notes=(note, *_padding_note(padding), *one.notes, *two.notes),
        )

    def ruled(self, records: dict[RecordKey, TensorRecord]) -> dict[RecordKey, TensorRecord]:
        """Return the records that can be compared, and remember the others."""
        self.left.update({key: self.unruled[key] for key in records if key in self.unruled})
        return {key: record for key, record in records.items() if key not in self.unruled}

    def alike(self, pairs: Iterable[Pair]) -> Iterable[Pair]:
        """Return the pairs, without those of activations to which no rule gives one shape."""
        for pair in pairs:
            shapes = (pair.baseline.shape, pair.candidate.shape)
            if self.names and pair.key.phase in _OF_MODULES and shapes[0] != shapes[1]:
                reason = "no layout rule by which both runs have one shape"
                self.left[pair.key] = f"{reason}: {pair.key.fqn} {pair.key.role.value}"
            else:
                yield pair

    def with_copies(self, rank: int, pairs: Iterable[Pair]) -> Iterable[Pair]:
        """Return the pairs, and one more for each copy on other ranks that should be equal and is not."""
        runs = (self.baseline.ranks[rank], self.candidate.ranks[rank])
        one, two = (run.copies if isinstance(run, CanonicalRank) else {} for run in runs)
        for pair in pairs:
            yield pair
            yield from (replace(pair, baseline=copy) for copy in one.get(pair.baseline.seq, ()))
            yield from (replace(pair, candidate=copy) for copy in two.get(pair.candidate.seq, ()))

    def with_holders(self, rank: int, pairs: Iterable[Pair]) -> Iterable[Pair]:
        """Note on each pair which ranks hold it."""
        one, two = self.baseline.ranks[rank], self.candidate.ranks[rank]
        if not isinstance(one, CanonicalRank) or not isinstance(two, CanonicalRank):
            return pairs
        return [
            replace(
                pair,
                held_by={
                    Side.BASELINE: one.held_by(pair.baseline),
                    Side.CANDIDATE: two.held_by(pair.candidate),
                },
            )
            for pair in pairs
        ]


def _padding_note(padding: Padding | None) -> Iterable[str]:
    if padding is not None and padding.common is not None:
        yield f"{padding.text}: the first {padding.common} are compared, of {padding.size} entries"


class _LeftOut:
    """Records that are not paired and are no loss, counted: of a rank as often as ``weight`` says."""

    def __init__(self) -> None:
        self.weight = 1
        self._recomputed: Counter[Side] = Counter()
        self._dropped: Counter[Drop] = Counter()
        self._random = 0
        self._schedule: Counter[Side] = Counter()

    def without_random(
        self, records: dict[RecordKey, TensorRecord], foreign: bool
    ) -> dict[RecordKey, TensorRecord]:
        """Leave out random states of different generators."""
        kept = {key: r for key, r in records.items() if not (foreign and key.role is Role.RNG)}
        self._random += self.weight * (len(records) - len(kept))
        return kept

    def expected(
        self, side: Side, alone: Iterable[TensorRecord], mappings: Sequence[Mapping], foreign: bool
    ) -> list[TensorRecord]:
        """Return the records without a partner that nothing accounts for.

        Of different frameworks one may train without Megatron's schedule, and has no count of it.
        """
        drops = [drop for mapping in mappings for drop in mapping.drop]
        rest = []
        for record in alone:
            drop = next((drop for drop in drops if drop.applies(record.key)), None)
            if record.key.recomputed:
                self._recomputed[side] += self.weight
            elif drop is not None:
                self._dropped[drop] += self.weight
            elif foreign and record.key.fqn == SCHEDULE:
                self._schedule[side] += self.weight
            else:
                rest.append(record)
        return rest

    def notes(self, mappings: dict[Side, list[Mapping]]) -> list[str]:
        """Say what was left out, and which drops found nothing to drop."""
        notes = [
            f"only the {side.value} recomputes activations: {count} recomputed records not compared"
            for side, count in self._recomputed.items()
            if count
        ]
        notes += [
            f"only the {side.value} steps Megatron's schedule: {count} records of its count not compared"
            for side, count in self._schedule.items()
        ]
        if self._random:
            notes.append(f"{self._random} random states of different generators not compared")
        for side, of_side in mappings.items():
            for mapping, drop in ((one, drop) for one in of_side for drop in one.drop):
                count = self._dropped[drop]
                patterns = (drop.fqn, drop.role, drop.phase, drop.slot)
                what = " ".join(pattern for pattern in patterns if pattern != "*") or "every record"
                dropped = f"{count} record{'' if count == 1 else 's'} of the {side.value} dropped ({what})"
                notes.append(f"{Path(mapping.where).name}: {dropped}: {drop.reason}")
        return notes


def _by_key(rank: RankRecords, steps: Sequence[int], start: int | None) -> dict[RecordKey, TensorRecord]:
    wanted = set(steps)
    kept = (r for r in rank.records if r.key.step in wanted and r.key.role is not Role.RESIDUAL)
    ordered = sorted(kept, key=lambda record: record.seq)
    return {record.key: record for record in (*initial(rank, start), *ordered)}


def _repeated(baseline: RankRecords, candidate: RankRecords) -> list[str]:
    """Say where a key names several records: only the last one can be compared."""
    notes = []
    for side, rank in ((Side.BASELINE, baseline), (Side.CANDIDATE, candidate)):
        keys = Counter(record.key for record in rank.records)
        twice = [key for key, count in keys.items() if count > 1]
        if twice:
            notes.append(
                f"{len(twice)} keys occur more than once on rank {rank.coordinates.rank} of the "
                f"{side.value}, "
                f"only their last record is compared: {twice[0].describe()}"
            )
    return notes


def _pairs(
    rank: int, one: dict[RecordKey, TensorRecord], two: dict[RecordKey, TensorRecord]
) -> Iterable[Pair]:
    return [Pair(rank=rank, baseline=record, candidate=two[key]) for key, record in one.items() if key in two]


def _unmatched(
    side: Side, rank: int, alone: Sequence[TensorRecord], other: dict[RecordKey, TensorRecord]
) -> list[Unmatched]:
    """Name records without a partner, each with the keys of the other run that resemble it."""
    by_moment: dict[tuple[object, ...], list[RecordKey]] = defaultdict(list)
    if len(alone) <= _NAMED_CLOSEST:
        for key in other:
            by_moment[_moment(key)].append(key)
    return [
        Unmatched(
            side=side, rank=rank, record=record, closest=_closest(record.key, by_moment[_moment(record.key)])
        )
        for record in alone
    ]


def _moment(key: RecordKey) -> tuple[object, ...]:
    return key.step, key.microbatch, key.phase


def _closest(key: RecordKey, others: Sequence[RecordKey]) -> tuple[RecordKey, ...]:
    """Return up to ``CLOSEST`` keys of the same moment, same role first, then by likeness of the fqn."""
    names = difflib.get_close_matches(
        key.fqn, sorted({other.fqn for other in others}), n=2 * CLOSEST, cutoff=0.6
    )
    likeness = {name: position for position, name in enumerate(names)}
    near = [other for other in others if other.fqn in likeness]
    near.sort(key=lambda other: (other.role != key.role, likeness[other.fqn], other.slot != key.slot))
    return tuple(near[:CLOSEST])
