"""What broke an invariant, place by place, and the findings made of it: one for each kind of fault."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from mindspeed_precision.records import Finding, RecordKey, Severity, TensorRecord

SHOWN = 3
"""Places of which a finding says what is there."""

NAMED = 6
"""Places, steps and ranks that it names."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One place where something does not hold.

    Attributes:
        where: the record.
        rank: whose it is.
        seq: its place in the execution of the rank.
        kind: what went wrong, in the same words wherever the same thing did; empty: not known.
        found: what is there, with numbers.
    """

    where: RecordKey
    rank: int
    seq: int
    found: str
    kind: str = ""


def failure(record: TensorRecord, rank: int, found: str, kind: str = "") -> Failure:
    """Return a failure at a record."""
    return Failure(where=record.key, rank=rank, seq=record.seq, found=found, kind=kind)


def findings_of(
    failures: Iterable[Failure],
    *,
    id: str,
    title: str,
    remedy: str,
    severity: Severity = Severity.ERROR,
    confidence: float = 0.95,
    notes: tuple[str, ...] = (),
) -> tuple[Finding, ...]:
    """Return one finding for each kind of fault, the earliest first; each says where it begins.

    Args:
        failures: in any order.
        id: of the findings.
        title: what does not hold, in a phrase without the place.
        remedy: what to do.
        severity: of the findings.
        confidence: of the findings.
        notes: further evidence of each.
    """
    by_kind: dict[str, list[Failure]] = defaultdict(list)
    for one in sorted(failures, key=lambda one: (one.where.step, one.seq, one.rank)):
        by_kind[one.kind].append(one)
    return tuple(
        Finding(
            id=id,
            severity=severity,
            confidence=confidence,
            title=f"{title}{': ' + kind if kind else ''}, first at {found[0].where.describe()}",
            evidence=(*_evidence(found), *notes),
            remedy=remedy,
            where=found[0].where,
        )
        for kind, found in by_kind.items()
    )


def _evidence(found: list[Failure]) -> list[str]:
    lines = [f"rank {one.rank}, {one.where.describe()}: {one.found}" for one in found[:SHOWN]]
    names = list(dict.fromkeys(one.where.fqn for one in found))
    ranks = sorted({one.rank for one in found})
    steps = sorted({one.where.step for one in found})
    if len(found) > 1:
        more = f", … {len(names) - NAMED} more" if len(names) > NAMED else ""
        lines.append(
            f"{len(found)} places: steps {_numbers(steps)}, ranks {_numbers(ranks)}, "
            f"{', '.join(names[:NAMED])}{more}"
        )
    return lines


def _numbers(values: list[int]) -> str:
    shown = ", ".join(map(str, values[:NAMED]))
    return f"{shown}, … {values[-1]}" if len(values) > NAMED else shown
