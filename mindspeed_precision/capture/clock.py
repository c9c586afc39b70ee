"""Which microbatch is it: learned from the model's own calls, with no help from the training loop."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from mindspeed_precision.records import NO_MICROBATCH, Phase

_Key = TypeVar("_Key")


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of one module: what its records share.

    Attributes:
        fqn: canonical name of the module.
        microbatch: microbatch of the step.
        occurrence: nth call of the module in this microbatch.
        recomputed: whether it is a recomputation inside the backward pass.
    """

    fqn: str
    microbatch: int
    occurrence: int
    recomputed: bool


def _number(counter: Counter[_Key], key: _Key) -> int:
    """Return how often ``key`` was counted before, and count it."""
    counter[key] += 1
    return counter[key] - 1


class Clock:
    """Counts microbatches per model chunk and calls per module within one step.

    The forward microbatch is the nth call of a chunk in the step. The backward microbatch is whichever
    microbatch the gradient that arrived last belongs to: hooks on a chunk's outputs carry the number, so that
    any pipeline schedule is followed.

    Args:
        inside_backward: tells whether this thread runs a backward pass, so that a forward is a recomputation.
    """

    def __init__(self, inside_backward: Callable[[], bool]) -> None:
        self.inside_backward = inside_backward
        self._forwards: Counter[int] = Counter()
        self._calls: Counter[tuple[int, str, bool]] = Counter()
        self._collectives: Counter[tuple[Phase, int, str]] = Counter()
        self._accumulations: Counter[tuple[int, str]] = Counter()
        self._stacks = threading.local()
        self._announced: int | None = None
        self.forward_microbatch = NO_MICROBATCH
        self.backward_microbatch = NO_MICROBATCH
        self.in_step = False

    def begin_step(self) -> None:
        """Start counting anew."""
        self._forwards.clear()
        self._calls.clear()
        self._accumulations.clear()
        self._collectives.clear()
        self._stack.clear()
        self._announced = None
        self.forward_microbatch = self.backward_microbatch = NO_MICROBATCH
        self.in_step = True

    def end_step(self) -> None:
        """Stop: what runs until the next step (evaluation, checkpoints) is not part of training."""
        self.in_step = False

    @property
    def microbatches(self) -> int:
        """Number of microbatches begun in this step."""
        return max(self._forwards.values(), default=0)

    @property
    def microbatch(self) -> int:
        """Microbatch of what runs now in this thread."""
        return self.backward_microbatch if self.inside_backward() else self.forward_microbatch

    def announce_forward(self, chunk: int) -> None:
        """Begin the next microbatch of ``chunk`` before its model is called (data are read first)."""
        self._advance(chunk)
        self._announced = chunk

    def begin_forward(self, chunk: int) -> None:
        """The model of ``chunk`` is called: the next microbatch, unless it was announced."""
        if self._announced is None:
            self._advance(chunk)

    def _advance(self, chunk: int) -> None:
        self.forward_microbatch = _number(self._forwards, chunk)

    @property
    def _stack(self) -> list[Call]:
        if not hasattr(self._stacks, "calls"):
            self._stacks.calls = []
        calls: list[Call] = self._stacks.calls
        return calls

    def enter(self, fqn: str) -> Call:
        """A module begins its forward."""
        recomputed = self.inside_backward()
        microbatch = self.microbatch
        occurrence = _number(self._calls, (microbatch, fqn, recomputed))
        call = Call(fqn=fqn, microbatch=microbatch, occurrence=occurrence, recomputed=recomputed)
        self._stack.append(call)
        return call

    def leave(self, fqn: str) -> Call | None:
        """The module ends its forward; None when its beginning was not seen."""
        stack = self._stack
        while stack:
            call = stack.pop()
            if call.fqn == fqn:
                return call
        return None

    def begin_accumulation(self, fqn: str, microbatch: int) -> int:
        """Return the number of this accumulation into ``fqn`` (a tied, fused weight has two a microbatch)."""
        return _number(self._accumulations, (microbatch, fqn))

    def end_accumulation(self, fqn: str, microbatch: int) -> int:
        """Return the number of the accumulation that was begun last."""
        return max(self._accumulations[microbatch, fqn] - 1, 0)

    def count_collective(self, phase: Phase, microbatch: int, name: str) -> int:
        """Return how often the collective ``name`` was called before in this phase, and count it."""
        return _number(self._collectives, (phase, microbatch, name))

    def count_schedule_step(self) -> int:
        """Return how often the schedule was stepped before in this step, and count it."""
        return _number(self._accumulations, (NO_MICROBATCH, ""))

    def count(self, fqn: str) -> int:
        """Return how often ``fqn`` was counted before in this forward microbatch, and count it."""
        return _number(self._calls, (self.forward_microbatch, fqn, False))

    @property
    def current(self) -> Call | None:
        """The innermost module whose forward is running in this thread."""
        return self._stack[-1] if self._stack else None
