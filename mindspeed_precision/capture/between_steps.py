"""Generators that training alone draws from, looked at where a step ends and where the next one begins."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from mindspeed_precision.records import Finding, Severity


def tracker_states() -> Mapping[str, Any]:
    """Return the states of Megatron's tracker, host tensors by name; empty where Megatron is not loaded."""
    module = sys.modules.get("megatron.core.tensor_parallel.random")
    if module is None:
        return {}
    kept = module.get_cuda_rng_tracker().get_states()
    # a tracker for CUDA graphs keeps generators
    return {name: state.get_state() if hasattr(state, "get_state") else state for name, state in kept.items()}


class BetweenSteps:
    """Notices what is drawn between two steps: by an evaluation with dropout, say.

    Args:
        rank: of this process, for what is reported.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._left: Mapping[str, Any] = {}
        self._reported: set[str] = set()

    def end_step(self) -> None:
        """A step is over."""
        self._left = dict(tracker_states())

    def begin_step(self, step: int) -> list[Finding]:
        """Return a finding for each generator that has moved since a step ended, the first time it has."""
        found = []
        for name, state in tracker_states().items() if self._left else ():
            left = self._left.get(name)
            if left is None or name in self._reported or left is state or bool((left == state).all()):
                continue
            self._reported.add(name)
            found.append(_finding(name, step, self._rank))
        return found


def _finding(name: str, step: int, rank: int) -> Finding:
    return Finding(
        id="rng.moved_between_steps",
        severity=Severity.WARNING,
        confidence=0.8,
        title=f"{name} was drawn from before step {step}, outside training, on rank {rank}",
        evidence=("an evaluation in eval mode draws nothing from it",),
        remedy="call model.eval() before an evaluation: dropout is on there, and training draws others",
    )
