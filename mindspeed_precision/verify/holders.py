"""Which ranks hold which part of a parameter's gradient, and which of them are terms of one sum."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mindspeed_precision.align.places import placement_of
from mindspeed_precision.record.placement import EMBEDDING_GROUP, TENSOR_GROUP
from mindspeed_precision.records import Phase, Placement, RankCoordinates, Role, TensorRecord
from mindspeed_precision.verify.run_facts import RunFacts

_EXPERT = re.compile(r".*\.experts(?:\..*)?")


@dataclass(frozen=True, kw_only=True)
class Held:
    """A gradient on a rank.

    Attributes:
        rank: whose it is.
        where: the rank in the layout.
        name: of the parameter; of a copy on another pipeline stage that of what it is a copy of.
        placement: of what the rank holds of the parameter.
        record: the gradient.
    """

    rank: int
    where: RankCoordinates
    name: str
    placement: Placement
    record: TensorRecord

    @property
    def range(self) -> tuple[int, int]:
        """Which elements of what the rank holds it is: all, or those of a distributed optimizer."""
        return self.record.part or (0, self.placement.local_numel)

    @property
    def expert(self) -> bool:
        """Whether it is of an expert, whose tokens come from other ranks."""
        return _EXPERT.fullmatch(self.name) is not None

    @property
    def place(self) -> tuple[object, ...]:
        """What all copies of one shard have in common."""
        return self.name, self.placement.splits


def held(facts: RunFacts, records: Iterable[tuple[int, TensorRecord]]) -> tuple[list[Held], set[str]]:
    """Place gradients; also return the names of parameters that cannot be."""
    placements: dict[int, Mapping[str, Placement | None]] = {
        number: {p.fqn: placement_of(p, rank.coordinates) for p in rank.parameters}
        for number, rank in facts.ranks.items()
    }
    found, unplaced = [], set()
    for rank, record in records:
        placement = placements[rank].get(record.key.fqn)
        start, stop = record.part or (0, placement.local_numel if placement else 0)
        if placement is None or record.numel != stop - start:
            unplaced.add(record.key.fqn)
            continue
        name = placement.copy_of or record.key.fqn
        where = facts.ranks[rank].coordinates
        found.append(Held(rank=rank, where=where, name=name, placement=placement, record=record))
    return found, unplaced


def reduced_gradients(facts: RunFacts) -> Mapping[int, list[tuple[int, TensorRecord]]]:
    """Return the reduced gradients with their ranks, by step."""
    found: dict[int, list[tuple[int, TensorRecord]]] = defaultdict(list)
    for number, record in facts.everywhere(Phase.REDUCE, Role.REDUCED_GRAD):
        if record.key.fqn in facts.parameters(number):
            found[record.key.step].append((number, record))
    return found


def local_gradients(facts: RunFacts) -> Mapping[int, list[tuple[int, TensorRecord]]]:
    """Return what each rank had accumulated when its last microbatch was done, by step."""
    last: dict[tuple[int, int, str], TensorRecord] = {}
    for number, record in facts.everywhere(Phase.ACCUMULATE, Role.MAIN_GRAD):
        ended = record.key.microbatch == facts.ranks[number].microbatches.get(record.key.step, 0) - 1
        if record.key.slot == "after" and ended:
            last[record.key.step, number, record.key.fqn] = record
    found: dict[int, list[tuple[int, TensorRecord]]] = defaultdict(list)
    for (step, number, _), record in last.items():
        found[step].append((number, record))
    return found


def summed_gradients(facts: RunFacts) -> Iterator[tuple[int, TensorRecord]]:
    """Yield the gradients before and after the reduction, with their ranks."""
    for by_step in (reduced_gradients(facts), local_gradients(facts)):
        for records in by_step.values():
            yield from records


def terms_of(result: Held, local: Sequence[Held]) -> tuple[list[Held], str]:
    """Return what must have been added up to a reduced gradient, and why that is not all; empty: it is.

    Args:
        result: the reduced gradient.
        local: what the ranks had of the same place before the reduction.
    """
    where, partial = result.where, result.placement.partial
    if result.expert:
        return list(local), ""
    summed = [
        one
        for one in local
        if partial == TENSOR_GROUP or result.placement.splits or one.where.tp_rank == where.tp_rank
    ]
    expected = where.dp_size * where.cp_size
    expected *= where.tp_size if partial == TENSOR_GROUP else 2 if partial == EMBEDDING_GROUP else 1
    if len(summed) != expected:
        return summed, f"{len(summed)} of {expected} terms were recorded"
    return summed, ""
