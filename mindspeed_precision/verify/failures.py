"""What broke an invariant, place by place, and the findings made of it: one for each kind of fault."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from mindspeed_precision.records import Severity, TensorRecord
from mindspeed_precision.verify.partial import NAMED, SHOWN, Failure, Partial, Places


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
) -> tuple[Partial, ...]:
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
    for one in sorted(failures, key=lambda one: one.order):
        by_kind[one.kind].append(one)
    found = []
    for kind, of_kind in by_kind.items():
        places, first = Places.of(of_kind, notes), of_kind[0]
        told = f"{title}{': ' + kind if kind else ''}"
        found.append(
            Partial(
                id=id,
                severity=severity,
                confidence=confidence,
                title=f"{told}, first at {first.where.describe()}",
                evidence=places.evidence(),
                remedy=remedy,
                where=first.where,
                order=first.order,
                kind=f"{severity.value}: {told}",
                count=len(of_kind),
                places=places,
            )
        )
    return tuple(found)


__all__ = ["NAMED", "SHOWN", "Failure", "failure", "findings_of"]
