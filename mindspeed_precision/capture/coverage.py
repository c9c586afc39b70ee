"""Which parameters had dW in which microbatch. A gap is named: absent data must never look like agreement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A trainable parameter of which no dW was seen.

    Attributes:
        fqn: canonical name of the parameter.
        step: step in which it was first missed.
        microbatches: microbatches of that step without dW.
        of: number of microbatches of that step.
    """

    fqn: str
    step: int
    microbatches: tuple[int, ...]
    of: int


class CoverageWitness:
    """Counts dW per parameter and microbatch; cheap enough to be always on."""

    def __init__(self) -> None:
        self._seen: defaultdict[str, set[int]] = defaultdict(set)
        self.gaps: dict[str, Gap] = {}
        self._unseen_gemms: dict[str, int] = {}
        self._reported: set[str] = set()

    def saw_wgrad(self, fqn: str, microbatch: int) -> None:
        """DW of parameter ``fqn`` was recorded."""
        self._seen[fqn].add(microbatch)

    def saw_no_gemm(self, fqn: str, step: int) -> None:
        """The backward of parallel linear ``fqn`` ran, but not the GEMM that makes its dW."""
        if fqn not in self._reported:
            self._unseen_gemms.setdefault(fqn, step)

    def take_unseen_gemms(self) -> dict[str, int]:
        """Return the linears whose GEMM was not seen and that were not returned before, with the step."""
        fresh, self._unseen_gemms = self._unseen_gemms, {}
        self._reported.update(fresh)
        return fresh

    def end_step(self, step: int, trainable: Iterable[str], microbatches: int) -> list[Gap]:
        """Return the gaps that this step is the first to show, and start anew."""
        fresh = []
        for fqn in trainable:
            missing = tuple(number for number in range(microbatches) if number not in self._seen[fqn])
            if missing and fqn not in self.gaps:
                gap = Gap(fqn=fqn, step=step, microbatches=missing, of=microbatches)
                self.gaps[fqn] = gap
                fresh.append(gap)
        self._seen.clear()
        return fresh
