"""Two runs as the checks of ``verify`` see them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mindspeed_precision.align.compatible import different_frameworks
from mindspeed_precision.align.definition import of_one_definition
from mindspeed_precision.align.lanes import describe_layouts, layouts_differ
from mindspeed_precision.align.layout import canonical_runs
from mindspeed_precision.align.mapping import Mapping as NameMapping
from mindspeed_precision.align.mapping import own_names, renamed
from mindspeed_precision.align.vocabulary import Padding, padding_of
from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.errors import PrecisionError
from mindspeed_precision.records import INIT_STEP, Phase, Role, Side, TensorRecord
from mindspeed_precision.verify.curves import Judged, judged_schedules
from mindspeed_precision.verify.group_table import ParameterRow, parameter_rows
from mindspeed_precision.verify.settings import RunSettings, settings_of

_KEPT = {(Phase.INIT, Role.PARAM), (Phase.BATCH, Role.BATCH), (Phase.OPTIMIZER, Role.HYPERPARAMETER)}


def is_read(record: TensorRecord) -> bool:
    """Tell whether a check of ``verify`` reads a record: what a run begins with, its data and numbers."""
    kind = record.key.phase, record.key.role
    return kind in _KEPT or kind == (Phase.INIT, Role.BUFFER) or record.key.role is Role.HYPERPARAMETER


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter before the first step.

    Attributes:
        rank: that recorded it; a lane of the canonical model where the layouts differ.
        record: what was recorded.
        run: whose it is.
    """

    rank: int
    record: TensorRecord
    run: Run

    def elements(self) -> HostTensor | None:
        """Return its elements, or None where none were kept.

        Raises:
            DumpError: the file that should hold them does not.
        """
        kept = self.record.payload is not None
        return self.run.ranks[self.rank].payload(self.record) if kept else None


@dataclass(frozen=True, kw_only=True)
class PairFacts:
    """What the checks ask of two runs.

    Attributes:
        baseline: under the names that both runs have.
        candidate: likewise.
        settings: by side, the configuration.
        names: by side, the run's own names that were changed, ``{own: common}``.
        notes: what a reader must know.
    """

    baseline: Run
    candidate: Run
    settings: Mapping[Side, RunSettings]
    names: Mapping[Side, Mapping[str, str]]
    notes: tuple[str, ...] = ()

    def run(self, side: Side) -> Run:
        """Return one of the runs."""
        return self.baseline if side is Side.BASELINE else self.candidate

    @cached_property
    def foreign(self) -> bool:
        """Whether two frameworks computed the runs."""
        return different_frameworks(self.baseline, self.candidate)

    @cached_property
    def other_layout(self) -> str:
        """How the parallel layouts differ, in words; empty where they do not."""
        if not layouts_differ(self.baseline, self.candidate):
            return ""
        return " against ".join(describe_layouts(self.baseline, self.candidate))

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The steps that every rank of both runs has whole, ascending."""
        found = [set(rank.steps) for run in (self.baseline, self.candidate) for rank in run.ranks.values()]
        return tuple(sorted(set.intersection(*found) - {INIT_STEP})) if found else ()

    @cached_property
    def schedules(self) -> Judged:
        """The curves of both runs, where they say enough of their arguments."""
        return judged_schedules(self.settings)

    @cached_property
    def rows(self) -> Mapping[Side, Mapping[str, ParameterRow]]:
        """By side and canonical name, every parameter and how it is trained."""
        return {side: parameter_rows(self.run(side), self.names[side]) for side in Side}

    def row_names(self, side: Side) -> list[str]:
        """Return the parameters of the whole model of one run: no copies, where the stages are others."""
        return [fqn for fqn, row in self.rows[side].items() if not (row.copied and self.other_layout)]

    @cached_property
    def padding(self) -> Padding | None:
        """How the vocabulary is padded, where the runs do it otherwise."""
        return None if self.uncertain else padding_of(*self._canonical[0])

    @cached_property
    def weights(self) -> Mapping[Side, Mapping[tuple[int, str], Weight]]:
        """By side, rank and name, the parameters before the first step."""
        return {side: _weights(run) for side, run in zip(Side, self._canonical[0], strict=True)}

    @property
    def uncertain(self) -> str:
        """Why weights of different layouts are not compared; empty where they are."""
        return self._canonical[1]

    @cached_property
    def _canonical(self) -> tuple[tuple[Run, Run], str]:
        runs = (_thinned(self.baseline), _thinned(self.candidate))
        if not self.other_layout:
            return runs, ""
        try:
            one, two = canonical_runs(*runs)
        except PrecisionError as error:
            return runs, f"the layouts differ ({self.other_layout}), and {error.what}"
        return (one.run, two.run), ""


def pair_facts(
    baseline: Run,
    candidate: Run,
    mappings: Sequence[NameMapping] = (),
    given: Mapping[Side, Mapping[str, Any]] | None = None,
) -> PairFacts:
    """Gather what the checks ask of two runs.

    Args:
        baseline: a run.
        candidate: another.
        mappings: names that differ.
        given: by side, the configuration that a run was launched with, where its ``run.json`` does not say.

    Raises:
        ConfigError: a mapping speaks of neither run, or gives two records one name.
        IncomparableError: the fingerprints are of two definitions and elements were not kept.
    """
    of_side: dict[Side, list[NameMapping]] = {side: [] for side in Side}
    for mapping in mappings:
        of_side[mapping.side_of(baseline, candidate)].append(mapping)
    names = {
        side: {own: common for common, own in own_names(run, of_side[side]).items()}
        for side, run in ((Side.BASELINE, baseline), (Side.CANDIDATE, candidate))
    }
    one, two, notes = of_one_definition(baseline, candidate)
    one, more = renamed(one, of_side[Side.BASELINE], Side.BASELINE)
    two, others = renamed(two, of_side[Side.CANDIDATE], Side.CANDIDATE)
    files = given or {}
    return PairFacts(
        baseline=one,
        candidate=two,
        settings={
            Side.BASELINE: settings_of(one, files.get(Side.BASELINE)),
            Side.CANDIDATE: settings_of(two, files.get(Side.CANDIDATE)),
        },
        names=names,
        notes=(*notes, *more, *others, *baseline.notes, *candidate.notes),
    )


def _thinned(run: Run) -> Run:
    """Leave out records that no check of ``verify`` reads: putting shards together takes time for each."""
    ranks = {
        number: replace(rank, records=tuple(r for r in rank.records if (r.key.phase, r.key.role) in _KEPT))
        for number, rank in run.ranks.items()
    }
    return replace(run, ranks=ranks)


def _weights(run: Run) -> dict[tuple[int, str], Weight]:
    return {
        (number, record.key.fqn): Weight(rank=number, record=record, run=run)
        for number, rank in run.ranks.items()
        for record in _initial(rank.records)
    }


def _initial(records: Iterable[TensorRecord]) -> Iterable[TensorRecord]:
    return (r for r in records if (r.key.phase, r.key.role) == (Phase.INIT, Role.PARAM))
