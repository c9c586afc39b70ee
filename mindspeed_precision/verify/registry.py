"""Where checks register, so that every finding id is known and documented (``docs/findings.md``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from mindspeed_precision.records import NO_MICROBATCH, CheckOutcome, Finding, Phase, RecordKey, Severity
from mindspeed_precision.verify.partial import Partial, plain

if TYPE_CHECKING:
    from mindspeed_precision.verify.spans import Part

S = TypeVar("S")

_LATE = frozenset({Phase.LOSS, Phase.REDUCE, Phase.CLIP, Phase.OPTIMIZER})
"""Phases that follow the microbatches of a step where a record is of the whole step."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one check says.

    Attributes:
        exercised: how many things it looked at.
        findings: what is wrong; each with an id that the check announced.
        failed: how many of the things broke it; None: as many as there are findings.
        skipped: why it looked at nothing, or at less than there is.
        applies: False where there is nothing of the kind that it is about.
    """

    exercised: int
    findings: tuple[Finding, ...] = ()
    failed: int | None = None
    skipped: str = ""
    applies: bool = True


Settle = Callable[[Sequence[Partial], int, int], tuple[Sequence[Partial], int]]
"""Takes findings, how many things were looked at and failed; returns those that stand, and of how many."""


@dataclass(frozen=True, kw_only=True)
class Check(Generic[S]):
    """A registered check of subjects of type ``S``: one run, a pair of runs, a launch.

    Attributes:
        ids: every finding id that it may give, the first is its name.
        holds: what must hold, in one sentence.
        unit: what it counts, in the plural.
        ask: the check itself.
        span: which ranks of a run it links, part by part; empty for checks that no run is too large for.
        settle: what becomes of findings that stand only where there is no other, or none that it excuses, in
            the whole run; None: all stand.
    """

    ids: tuple[str, ...]
    holds: str
    unit: str
    ask: Callable[[S], Answer]
    span: tuple[Part, ...] = ()
    settle: Settle | None = None

    def outcome(self, answer: Answer) -> CheckOutcome:
        """Return what it looked at."""
        return CheckOutcome(
            name=self.ids[0],
            holds=self.holds,
            exercised=answer.exercised,
            unit=self.unit,
            failed=len(answer.findings) if answer.failed is None else answer.failed,
            skipped=answer.skipped,
            applies=answer.applies,
        )

    def answer(self, subject: S, ask: Callable[[S], Answer] | None = None) -> Answer:
        """Ask it, or a part of it; what it gives is not settled."""
        answer = (ask or self.ask)(subject)
        assert {finding.id for finding in answer.findings} <= set(self.ids), self.ids
        return answer

    def settled(self, answer: Answer) -> Answer:
        """Return an answer about a whole run as it stands."""
        found = [one for one in answer.findings if isinstance(one, Partial)]
        if self.settle is None or not found or answer.failed is None:
            return answer
        kept, failed = self.settle(found, answer.exercised, answer.failed)
        return replace(answer, findings=tuple(kept), failed=failed)


class Checks(Generic[S]):
    """The checks of one command, in the order of their registration.

    Args:
        spanned: each must say which ranks it links.
    """

    def __init__(self, *, spanned: bool = False) -> None:
        self._checks: list[Check[S]] = []
        self._spanned = spanned

    def __iter__(self) -> Iterator[Check[S]]:
        return iter(self._checks)

    def register(
        self, *ids: str, holds: str, unit: str, span: Sequence[Part] = (), settle: Settle | None = None
    ) -> Callable[[Callable[[S], Answer]], Callable[[S], Answer]]:
        """Register a check, with every id that it may give.

        Raises:
            TypeError: it does not say which ranks it links, and has to.
        """
        if self._spanned and not span:
            raise TypeError(f"{ids[0]}: which ranks does it link? span=[each_rank()], … (verify/spans.py)")

        def keep(ask: Callable[[S], Answer]) -> Callable[[S], Answer]:
            self._checks.append(
                Check(ids=ids, holds=holds, unit=unit, ask=ask, span=tuple(span), settle=settle)
            )
            return ask

        return keep

    def ids(self) -> frozenset[str]:
        """Return every id that these checks may give."""
        return frozenset(id_ for check in self._checks for id_ in check.ids)

    def ask_all(self, subject: S) -> tuple[tuple[Finding, ...], tuple[CheckOutcome, ...]]:
        """Ask every check.

        Returns:
            The findings, worst first, and what each check looked at.
        """
        findings: list[Finding] = []
        outcomes = []
        for check in self._checks:
            answer = check.settled(check.answer(subject))
            findings += map(plain, answer.findings)
            outcomes.append(check.outcome(answer))
        return tuple(worst_first(findings)), tuple(outcomes)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Order findings by severity, then by how sure they are; else as they came."""
    return sorted(findings, key=lambda finding: (list(Severity).index(finding.severity), -finding.confidence))


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Order findings by severity, then as a step goes (cause before effect), then by how sure they are."""
    return sorted(
        findings,
        key=lambda finding: (
            list(Severity).index(finding.severity),
            _place(finding.where),
            -finding.confidence,
        ),
    )


def _place(where: RecordKey | None) -> tuple[int, bool, int, int]:
    """Return when a record is seen: by step, microbatches before what is of the whole step, and phase."""
    if where is None:
        return -2, False, 0, 0
    late = where.microbatch == NO_MICROBATCH and where.phase in _LATE
    return where.step, late, where.microbatch, list(Phase).index(where.phase)


__all__ = ["Answer", "Check", "Checks", "in_order", "worst_first"]
