"""One rank's voice: what of a recording is told to the person who watches the training."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_precision.config import Settings
from mindspeed_precision.live.expectation import Shape, expect
from mindspeed_precision.live.lines import Told, finding_lines, start_line, summary_lines, tell
from mindspeed_precision.records import Finding, RankCoordinates
from mindspeed_precision.report.progress import StepBar


class Reporter:
    """Tells what one rank has to tell.

    The first rank that records speaks for all at the start and at the end; what is found is told by the first
    rank of each pipeline stage, since the others of the stage find the same.

    Args:
        settings: of the run.
        where: the rank.
        arguments: Megatron's; none for another loop.
    """

    def __init__(self, settings: Settings, where: RankCoordinates, arguments: Mapping[str, Any]) -> None:
        self._settings, self._where, self._arguments = settings, where, arguments
        recording = [rank for rank in range(where.world_size) if rank in settings.ranks]
        self._speaks = where.rank == recording[0]
        self._ranks = len(recording)
        first = (where.tp_rank, where.dp_rank, where.cp_rank, where.ep_rank) == (0, 0, 0, 0)
        self._finds = first or self._speaks
        self._told: set[str] = set()
        self._steps: list[int] = []
        self._warnings = 0
        self._seconds = 0.0
        self._bar: StepBar | None = None

    def warn(self, line: str) -> None:
        """Pass on a whole line of the watch, and count it."""
        self._warnings += 1
        sys.stderr.write(line + "\n")

    def start(
        self,
        shape: Shape,
        *,
        records: int,
        index_bytes: int,
        parameter_bytes: int,
        seconds: float,
    ) -> None:
        """Tell what to expect, measured on the initial parameters.

        Args:
            shape: of the model on this rank.
            records: of the initial parameters.
            index_bytes: of their lines.
            parameter_bytes: of their elements.
            seconds: that recording them took.
        """
        if not self._speaks:
            return
        expected = expect(
            shape,
            self._settings.capture.on_rank(self._where.rank),
            step=self._settings.steps.ranges[0][0] if self._settings.steps.ranges else 0,
            bytes_per_record=index_bytes / records if records else 0.0,
            seconds_per_record=seconds / records if records else 0.0,
            seconds_per_byte=seconds / parameter_bytes if parameter_bytes else 0.0,
        )
        known = "micro_batch_size" in self._arguments
        tell(start_line(self._settings, expected, shape, world_size=self._where.world_size, known=known))
        self._bar = StepBar(self._asked())

    def _asked(self) -> int | None:
        """Return how many steps are to be recorded; None where the loop does not say when it ends."""
        last, stop = self._arguments.get("train_iters"), self._settings.stop_after
        if type(last) is not int:
            return None
        first = self._arguments.get("iteration")
        end = last if stop is None else min(last, stop + 1)
        return sum(step in self._settings.steps for step in range(first if type(first) is int else 0, end))

    def found(self, findings: Sequence[Finding], *, when: str) -> None:
        """Tell what is wrong, each kind of it once."""
        if not self._finds:
            return
        for line in finding_lines(findings, self._told, where=f"{when}, rank {self._where.rank}"):
            self._warnings += 1
            tell(line)

    def step(self, step: int, findings: Sequence[Finding], *, began: float) -> None:
        """Count a recorded step.

        Args:
            step: which.
            findings: that it gave.
            began: when its end began, by ``time.perf_counter``.
        """
        self._seconds += time.perf_counter() - began
        self.found(findings, when=f"step {step}")
        if step in self._settings.steps:
            self._steps.append(step)
            if self._bar is not None:
                self._bar.step(len(self._steps))

    def end(
        self,
        findings: Sequence[Finding],
        *,
        records: int,
        index_bytes: int,
        payload_bytes: int,
        parameters: int,
        gaps: int,
        error: str = "",
    ) -> None:
        """Tell what there is, and what to run next.

        Args:
            findings: of this rank, all of them.
            records: that were written.
            index_bytes: of their lines.
            payload_bytes: of elements.
            parameters: trainable ones of this rank.
            gaps: of those, the ones of which dW was missed.
            error: what ended the training, where it did not end well.
        """
        if self._bar is not None:
            self._bar.close()
        if not self._speaks:
            return
        told = Told(
            steps=self._steps,
            records=records,
            bytes=index_bytes + payload_bytes,
            payload_bytes=payload_bytes,
            seconds=self._seconds,
            parameters=parameters,
            gaps=gaps,
            wgrad=self._settings.capture.wgrad,
            rank=self._where.rank,
            ranks=self._ranks,
        )
        for line in summary_lines(self._settings, told, findings, warnings=self._warnings, error=error):
            tell(line)


__all__ = ["Reporter"]
