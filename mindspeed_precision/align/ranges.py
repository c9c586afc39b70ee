"""What a distributed optimizer divides: each data-parallel rank updates ranges of some parameters alone.

So each rank records other parameters' reduced and clipped gradients, numbers and states than its replicas do,
and a record that all of them have comes at another place of each. What is asked about the order of records
over ranks must not depend on that.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from mindspeed_precision.align.start import gathers_late
from mindspeed_precision.dump.reader import RankRecords, Run
from mindspeed_precision.records import Phase, RecordKey, Role, TensorRecord

_RANGE = re.compile(r"\d+:\d+")

DIVIDED = (
    (Phase.REDUCE, Role.REDUCED_GRAD),
    (Phase.CLIP, Role.MAIN_GRAD),
    (Phase.OPTIMIZER, Role.HYPERPARAMETER),
    (Phase.OPTIMIZER, Role.EXP_AVG),
    (Phase.OPTIMIZER, Role.EXP_AVG_SQ),
    (Phase.OPTIMIZER, Role.MASTER_PARAM),
)
"""Of a parameter of which a rank has a range, the records that are of this range."""

GATHERED = (Phase.OPTIMIZER, Role.PARAM)
"""The parameter after a step is of the range, too, where the others' are gathered later."""

Place = tuple[int, ...]
"""Where a record comes in the execution of its rank, as it compares with those of other ranks."""


def unranged(key: RecordKey) -> RecordKey:
    """Return the key without the range that the slot of a reduced gradient names."""
    if key.phase is Phase.REDUCE and _RANGE.fullmatch(key.slot):
        return replace(key, slot="")
    return key


def ranged_names(records: Iterable[TensorRecord]) -> frozenset[str]:
    """Return the parameters of which a rank reduced ranges; none unless the optimizer is distributed."""
    return frozenset(r.key.fqn for r in records if unranged(r.key) is not r.key)


def is_divided(key: RecordKey, *, late: bool) -> bool:
    """Tell whether a record of a parameter of which its rank has a range is of this range alone.

    Args:
        key: of the record.
        late: parameters are gathered beside the next forward (``gathers_late``).
    """
    kind = key.phase, key.role
    return kind in DIVIDED or (late and kind == GATHERED)


def gather_late(*runs: Run) -> bool:
    """Tell whether one of the runs records of a parameter after a step the rank's own range."""
    return any(gathers_late(run) for run in runs)


def by_itself(number: int) -> Place:
    """Return where a record comes that is of no range, by its number among these."""
    return number, 0, 0, 0


def execution_of(rank: RankRecords, *, late: bool) -> Mapping[int, Place]:
    """Return by ``seq`` where the records of a rank with ranges come; nothing for any other rank."""
    if rank.places is not None:
        return rank.places
    return places_of(rank.records, (parameter.fqn for parameter in rank.parameters), late=late)


def places_of(records: Iterable[TensorRecord], declared: Iterable[str], *, late: bool) -> Mapping[int, Place]:
    """Return by ``seq`` where the records of a rank with ranges come; nothing for any other rank.

    Records that all replicas have are counted alone; those of ranges come between them, in the order of their
    phase, of the declaration of their parameters, and of the rank's own.

    Args:
        records: of one rank, in execution order.
        declared: names of its parameters, in order.
        late: as ``is_divided`` has it.
    """
    listed = list(records)
    names = ranged_names(listed)
    if not names:
        return {}
    numbers = {name: number for number, name in enumerate(declared)}
    phases = {phase: number for number, phase in enumerate(Phase)}
    shared = -1
    found: dict[int, Place] = {}
    own: Counter[str] = Counter()
    for record in listed:
        key = record.key
        if key.fqn in names and is_divided(key, late=late):
            found[record.seq] = (shared, phases[key.phase], numbers.get(key.fqn, len(numbers)), own[key.fqn])
            own[key.fqn] += 1
        else:
            shared += 1
            own.clear()
            found[record.seq] = by_itself(shared)
    return found
