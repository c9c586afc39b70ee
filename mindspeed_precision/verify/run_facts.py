"""One run as the checks of ``check`` see it: its records by what they are."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.config import capture_rules
from mindspeed_precision.dump.reader import RankRecords, Run
from mindspeed_precision.records import (
    INIT_STEP,
    ParameterDeclaration,
    Phase,
    RankCoordinates,
    RecordKey,
    Role,
    TensorRecord,
)
from mindspeed_precision.verify.survey import Survey

Kind = tuple[Phase, Role]
T = TypeVar("T")


@dataclass(frozen=True)
class RunFacts:
    """What checks ask of a run, or of a part of it.

    Attributes:
        run: as read; of a part of a run its ranks alone, or some of their records.
        survey: of a part, what is known of the whole run.
        expected: of a part, how many ranks it has where each recorded.
    """

    run: Run
    survey: Survey | None = None
    expected: int | None = None

    @property
    def ranks(self) -> Mapping[int, RankRecords]:
        """The ranks, by number."""
        return self.run.ranks

    @cached_property
    def coordinates(self) -> Mapping[int, RankCoordinates]:
        """Where every rank of the whole run sits that recorded."""
        if self.survey is not None:
            return self.survey.coordinates
        return {number: rank.coordinates for number, rank in self.ranks.items()}

    @property
    def missing(self) -> int:
        """How many ranks of the run, or of this part of it, did not record."""
        size = next(iter(self.ranks.values())).coordinates.world_size
        return (size if self.expected is None else self.expected) - len(self.ranks)

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The whole steps that every rank of the run has, ascending, without what was before the first."""
        if self.survey is not None:
            return self.survey.steps
        common = [set(records.steps) for records in self.ranks.values()]
        return tuple(sorted(set.intersection(*common) - {INIT_STEP})) if common else ()

    @cached_property
    def begun(self) -> frozenset[int]:
        """The steps of which the run has any record, also those that did not end."""
        if self.survey is not None:
            return self.survey.begun
        ranks = self.ranks.values()
        return frozenset(r.key.step for rank in ranks for r in (*rank.records, *rank.unfinished))

    @cached_property
    def updated(self) -> frozenset[int]:
        """The steps in which some rank's optimizer was seen to update."""
        if self.survey is not None:
            return self.survey.updated
        return frozenset(r.key.step for _, r in self.everywhere(Phase.OPTIMIZER, Role.HYPERPARAMETER))

    @cached_property
    def half(self) -> bool:
        """Whether some rank has parameters in float16."""
        if self.survey is not None:
            return self.survey.half
        return any(p.dtype == "float16" for rank in self.ranks for p in self.parameters(rank).values())

    @cached_property
    def rated(self) -> bool:
        """Whether some optimizer was seen to use a learning rate."""
        if self.survey is not None:
            return self.survey.rated
        return any(r.key.slot == "lr" for _, r in self.everywhere(Phase.OPTIMIZER, Role.HYPERPARAMETER))

    @cached_property
    def kinds(self) -> Mapping[Kind, int]:
        """How many records of each kind the run has."""
        if self.survey is not None:
            return self.survey.kinds
        found: Counter[Kind] = Counter()
        for (_, phase, role), records in self._by_kind.items():
            found[phase, role] += len(records)
        return found

    @cached_property
    def _by_kind(self) -> Mapping[tuple[int, Phase, Role], list[TensorRecord]]:
        found: dict[tuple[int, Phase, Role], list[TensorRecord]] = defaultdict(list)
        for rank, records in self.ranks.items():
            for record in records.records:
                found[rank, record.key.phase, record.key.role].append(record)
        return found

    def surveyed(self) -> Survey:
        """Return what the other parts of a run must know of this one."""
        return Survey(
            coordinates=self.coordinates,
            steps=self.steps,
            begun=self.begun,
            updated=self.updated,
            half=self.half,
            rated=self.rated,
            kinds=self.kinds,
        )

    def of(
        self, rank: int, phase: Phase, role: Role, *, step: int | None = None, slot: str | None = None
    ) -> list[TensorRecord]:
        """Return one rank's records of one kind, in execution order; of one step and slot where given."""
        return [
            record
            for record in self._by_kind.get((rank, phase, role), ())
            if (step is None or record.key.step == step) and (slot is None or record.key.slot == slot)
        ]

    def everywhere(self, phase: Phase, role: Role) -> Iterator[tuple[int, TensorRecord]]:
        """Yield the records of one kind with their ranks."""
        for rank in self.ranks:
            for record in self._by_kind.get((rank, phase, role), ()):
                yield rank, record

    def once(self, what: Hashable, make: Callable[[], T]) -> T:
        """Return what ``make`` gives, made once for all checks that ask by the same name."""
        if what not in self._made:
            self._made[what] = make()
        found: T = self._made[what]
        return found

    @cached_property
    def _made(self) -> dict[Hashable, Any]:
        return {}

    def parameters(self, rank: int) -> Mapping[str, ParameterDeclaration]:
        """Return the parameters that a rank declared, by name."""
        return {parameter.fqn: parameter for parameter in self.ranks[rank].parameters}

    def payload(self, rank: int, record: TensorRecord) -> HostTensor | None:
        """Return the elements of a record, or None where none were kept.

        Raises:
            DumpError: the file that should hold them does not.
        """
        return None if record.payload is None else self.ranks[rank].payload(record)

    def dropped(self, key: RecordKey) -> bool:
        """Tell whether a rule of the run left a record out: that it is absent says nothing then."""
        rules = self.once("rules", lambda: capture_rules(self.run.manifest.get("settings")))
        return next((rule.level is None for rule in reversed(rules) if rule.applies(key)), False)

    @property
    def config(self) -> Mapping[str, Mapping[str, Any]]:
        """The effective configuration, by kind (``megatron_args``, ``optimizer_config`` …)."""
        found = self.run.manifest.get("config")
        return found if isinstance(found, dict) else {}
