"""Warnings while training, from results that are on the host already: no device is waited for.

Told on stderr, one line each, and each kind once in ``QUIET`` steps: symptoms of the loss and the gradient
norm (``mindspeed_precision.symptoms``) by the first rank and, of the loss, by the first rank of the last
pipeline stage; NaN and infinities by the rank in whose forward or backward pass they arise.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from mindspeed_precision.records import NO_MICROBATCH, Phase, RankCoordinates, RecordKey, Role
from mindspeed_precision.symptoms import SWINGS, WINDOW, symptoms

QUIET = 100
"""Steps in which a warning is not told again."""

Seen = tuple[RecordKey, str]
"""Identity of a record and its digest, as a record line has it (``dump.encode.digest_text``)."""

_REDUCED = frozenset({Phase.REDUCE, Phase.CLIP, Phase.OPTIMIZER})
"""Phases in which a rank has what others had before."""

_FORWARD = frozenset({Phase.INIT, Phase.BATCH, Phase.FPROP, Phase.LOSS})
_STATISTICS = re.compile(r'"mean":("?)([^",]+)\1.*?"nans":(\d+),"infs":(\d+)')
_FINITE = '"nans":0,"infs":0'
_UNKNOWN = '"statistics":null'


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")


class Onlooker(Protocol):
    """Is shown what was recorded of each step."""

    def end_step(self, step: int, seen: Sequence[Seen]) -> None:
        """Look at the records of a step."""
        ...


class Onlookers:
    """Several that look, in order."""

    def __init__(self, those: Sequence[Onlooker]) -> None:
        self._those = tuple(those)

    def end_step(self, step: int, seen: Sequence[Seen]) -> None:
        """Show a step to each."""
        for one in self._those:
            one.end_step(step, seen)


class Watch:
    """What one rank remembers of the steps before.

    Args:
        where: the rank.
        scaled: the loss is scaled so that gradients may overflow, and the step is skipped then (float16).
        tell: is given each line.
    """

    def __init__(
        self, *, where: RankCoordinates, scaled: bool = False, tell: Callable[[str], None] = _to_stderr
    ) -> None:
        self._rank = where.rank
        first = (where.tp_rank, where.dp_rank, where.cp_rank) == (0, 0, 0)
        self._tells_log = where.rank == 0 or (first and where.pp_rank == where.pp_size - 1)
        self._scaled = scaled
        self._tell = tell
        self._losses: deque[tuple[int, float]] = deque(maxlen=WINDOW + SWINGS)
        self._norms: deque[tuple[int, float]] = deque(maxlen=WINDOW + SWINGS)
        self._told: dict[str, int] = {}

    def end_step(self, step: int, seen: Sequence[Seen]) -> None:
        """Look at the records of a step.

        Args:
            step: the step.
            seen: its records, in execution order.
        """
        self._nonfinite(step, seen)
        for key, digest in seen:
            if key.microbatch != NO_MICROBATCH or key.role not in (Role.LOSS, Role.GRAD_NORM):
                continue
            value = _value(digest)
            if value is not None and key.role is Role.LOSS and key.slot == "lm loss":
                self._losses.append((step, value))
            elif value is not None and key.role is Role.GRAD_NORM and not key.slot:
                self._norms.append((step, value))
        if self._tells_log:
            only_loss = self._rank != 0  # the first rank tells what both see
            for one in symptoms(list(self._losses), [] if only_loss else list(self._norms)):
                self._warn(step, one.id, f"{one.title}: {one.evidence}")

    def _nonfinite(self, step: int, seen: Sequence[Seen]) -> None:
        found = next((key for key, digest in seen if _FINITE not in digest and _is_bad(key, digest)), None)
        if found is None or found.phase in _REDUCED or "nonfinite.first" in self._told:
            return
        if self._scaled and found.phase not in _FORWARD and _skipped(key for key, _ in seen):
            return
        place = f"{found.fqn or '(model)'} {found.role.value} in {found.phase.value}"
        self._warn(step, "nonfinite.first", f"the first NaN or Inf: {place}, microbatch {found.microbatch}")

    def _warn(self, step: int, kind: str, text: str) -> None:
        last = self._told.get(kind)
        if last is None or step - last >= QUIET:
            self._told[kind] = step
            self._tell(f"mindspeed-precision: warning: step {step}, rank {self._rank}: {text} [{kind}]")


def _is_bad(key: RecordKey, digest: str) -> bool:
    mask = key.role in (Role.INPUT, Role.BATCH) and "mask" in key.slot
    return _UNKNOWN not in digest and not mask


def _skipped(keys: Iterable[RecordKey]) -> bool:
    """Tell whether the optimizer was not seen to update: it skipped the step, or is not recorded."""
    return not any(key.phase is Phase.OPTIMIZER and key.role is Role.HYPERPARAMETER for key in keys)


def _value(digest: str) -> float | None:
    """Return the number of a one-element record, from its digest."""
    found = _STATISTICS.search(digest)
    if found is None:
        return None
    _, mean, nans, infs = found.groups()
    return float("nan") if int(nans) else float("inf") if int(infs) else float(mean)
