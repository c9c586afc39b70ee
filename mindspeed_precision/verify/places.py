"""Where in a run something was found: the earliest place of several, and ranks that see the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mindspeed_precision.align.merging import execution_order
from mindspeed_precision.align.stages import Stages
from mindspeed_precision.records import (
    COLLECTIVES,
    NO_MICROBATCH,
    Finding,
    RankCoordinates,
    RecordKey,
    TensorRecord,
)
from mindspeed_precision.verify.partial import Partial
from mindspeed_precision.verify.run_facts import RunFacts


@dataclass(frozen=True, kw_only=True)
class Found:
    """A record that breaks a law.

    Attributes:
        rank: the rank that recorded it.
        record: the record.
        text: what is wrong with it, in one phrase.
        number: how wrong it is, where that is a number.
    """

    rank: int
    record: TensorRecord
    text: str = ""
    number: float = 0.0


def in_execution_order(facts: RunFacts, found: Iterable[Found]) -> list[Found]:
    """Order what was found as the whole model runs: by step, microbatch, forward, backward, stage."""
    stages = Stages(facts.run)
    return sorted(found, key=lambda one: execution_order(stages, one.rank, one.record))


def seen_first(found: Found, facts: RunFacts, finding: Finding, *, count: int, kind: str = "") -> Partial:
    """Return a finding with when it is seen.

    Args:
        found: the earliest place that it is of.
        facts: of the run.
        finding: what is wrong.
        count: how many places it is of.
        kind: where a check tells several things apart under one id.
    """
    order = execution_order(Stages(facts.run), found.rank, found.record)
    return Partial(**vars(finding), order=(*order, found.rank), kind=kind, count=count)


def tensor_group(where: RankCoordinates) -> tuple[int, int, int]:
    """Return what ranks of one tensor-parallel group have in common."""
    return where.pp_rank, where.dp_rank, where.cp_rank


def by_group(
    facts: RunFacts, held: Iterable[tuple[int, TensorRecord]]
) -> Mapping[tuple[tuple[int, int, int], RecordKey], list[tuple[int, TensorRecord]]]:
    """Group records of one key over the ranks of each tensor-parallel group; groups of one are left out."""
    groups: dict[tuple[tuple[int, int, int], RecordKey], list[tuple[int, TensorRecord]]] = defaultdict(list)
    for rank, record in held:
        groups[tensor_group(facts.ranks[rank].coordinates), record.key].append((rank, record))
    return {place: members for place, members in groups.items() if len(members) > 1}


def of_collective(record: TensorRecord, *names: str) -> bool:
    """Tell whether a record is of what a collective is given or gives back: of any, or of those named."""
    return record.key.slot.partition(".")[0] in (names or COLLECTIVES)


def in_step(record: TensorRecord) -> bool:
    """Tell whether a record is of a training step, and not of what was before the first."""
    return record.key.step >= 0


def in_microbatch(record: TensorRecord) -> bool:
    """Tell whether a record is of one microbatch."""
    return record.key.microbatch != NO_MICROBATCH


def steps_text(steps: Iterable[int]) -> str:
    """Return step numbers for a person: ``step 3`` or ``steps 1, 2, 5 and 4 more``."""
    numbers = sorted(set(steps))
    shown = ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")
    return f"step{'s' if len(numbers) > 1 else ''} {shown}"
