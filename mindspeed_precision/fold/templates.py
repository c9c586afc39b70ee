"""What the lines of a template are: read once by the strict reader, kept as arrays of positions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.compare.movement import GRADIENTS
from mindspeed_precision.dump.reader import RankRecords
from mindspeed_precision.fold.rank_lines import RankLines
from mindspeed_precision.records import Phase, RecordKey, Role, TensorRecord

Positions = NDArray[np.int64]

_UPDATED = (Role.PARAM, Role.MASTER_PARAM)
_PRODUCTS = (Role.WGRAD, Role.BGRAD)


@dataclass(frozen=True, kw_only=True)
class Template:
    """The records of all ranks that have one template.

    Attributes:
        keys: in execution order.
        steps: whole steps.
        microbatches: of each.
        reason: why a rank of this template stands for itself alone; empty where it may stand for others.
        numels: ``[records]`` elements of each.
        scalars: the records of one element, by position: of the rank that was parsed.
        numbers: positions of what the optimizer used.
        products: positions of dW.
        after: positions of parameters after a step.
        before: ``[after]``: of the same before it.
        updates: ``[after]``: by what ``compare.movement`` judges an update that changes nothing: parameter
            and gradient; none where the rank used no learning rate for it.
        batches: positions of the data, by slot and step.
    """

    keys: tuple[RecordKey, ...]
    steps: tuple[int, ...]
    microbatches: dict[int, int]
    reason: str
    numels: Positions
    scalars: dict[int, TensorRecord]
    numbers: Positions
    products: Positions
    after: Positions
    before: Positions
    updates: tuple[tuple[int, ...], ...]
    batches: dict[tuple[str, int], Positions]


def template_of(rank: RankRecords, lines: RankLines) -> Template | None:
    """Return the template of a rank that was read both ways; None where the columns miss a record."""
    records = rank.records
    whole = len(records) == len(lines.first) and not rank.unfinished and not rank.notes
    if not whole or any(r.digest.fingerprint != int(w) for r, w in zip(records, lines.first, strict=True)):
        return None
    return replace(template_of_records(records), steps=rank.steps, microbatches=dict(rank.microbatches))


def template_of_records(records: Sequence[TensorRecord]) -> Template:
    """Return the template of some records of a rank."""
    after, before = _updates(records)
    return Template(
        keys=tuple(record.key for record in records),
        steps=(),
        microbatches={},
        reason=_reason(records),
        numels=np.array([record.numel for record in records], np.int64),
        scalars={n: replace(r, place=None) for n, r in enumerate(records) if r.numel == 1},
        numbers=_where(records, lambda r: r.key.role is Role.HYPERPARAMETER),
        products=_where(records, lambda r: r.key.phase is Phase.WGRAD and r.key.role in _PRODUCTS),
        after=after,
        before=before,
        updates=_judged(records, after),
        batches=_batches(records),
    )


def _reason(records: Sequence[TensorRecord]) -> str:
    if any(record.payload is not None for record in records):
        return "elements were kept"
    if any(record.digest.sketch is not None for record in records):
        return "sketches were kept"
    if len({record.key for record in records}) < len(records):
        return "a key names several records"
    return ""


def _updates(records: Sequence[TensorRecord]) -> tuple[Positions, Positions]:
    at = {
        (r.key.fqn, r.key.role, r.key.slot, r.key.step): n
        for n, r in enumerate(records)
        if r.key.role in _UPDATED
    }
    found = [
        (n, at[fqn, role, slot, step - 1])
        for (fqn, role, slot, step), n in at.items()
        if (fqn, role, slot, step - 1) in at
    ]
    both = np.array(found, np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def _judged(records: Sequence[TensorRecord], after: Positions) -> tuple[tuple[int, ...], ...]:
    gradients: dict[tuple[int, str], dict[tuple[Phase, Role], list[int]]] = defaultdict(dict)
    used: set[tuple[int, str]] = set()
    for number, record in enumerate(records):
        key = record.key
        if (key.phase, key.role) in GRADIENTS and key.slot != "before":
            gradients[key.step, key.fqn].setdefault((key.phase, key.role), []).append(number)
        if key.role is Role.HYPERPARAMETER and key.slot == "lr":
            used.add((key.step, key.fqn))
    found: list[tuple[int, ...]] = []
    for number in after.tolist():
        place = records[number].key.step, records[number].key.fqn
        closest = next((gradients[place][kind] for kind in GRADIENTS if kind in gradients[place]), [])
        found.append((number, *closest) if place in used else ())
    return tuple(found)


def _batches(records: Sequence[TensorRecord]) -> dict[tuple[str, int], Positions]:
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    for number, record in enumerate(records):
        if record.key.role is Role.BATCH:
            found[record.key.slot, record.key.step].append(number)
    return {place: np.array(some, np.int64) for place, some in found.items()}


def _where(records: Sequence[TensorRecord], wanted: Callable[[TensorRecord], bool]) -> Positions:
    return np.array([n for n, record in enumerate(records) if wanted(record)], np.int64)


@dataclass(frozen=True)
class Matched:
    """Which records of two templates have one key.

    Attributes:
        one: ``[pairs]`` positions in the baseline's.
        two: ``[pairs]`` positions in the candidate's.
    """

    one: Positions
    two: Positions


def matched(one: Template, two: Template) -> Matched:
    """Match two templates on their keys, in the order of the first."""
    if one is two:
        every = np.arange(len(one.keys))
        return Matched(every, every)
    at: dict[RecordKey, int] = {key: n for n, key in enumerate(two.keys)}
    pairs: Sequence[tuple[int, int]] = [(n, at[key]) for n, key in enumerate(one.keys) if key in at]
    both = np.array(pairs, np.int64).reshape(-1, 2)
    return Matched(both[:, 0], both[:, 1])
