"""Findings about what a recording lacks: records that were lost, gradients and GEMMs that were not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspeed_precision.capture.containment import Failure
from mindspeed_precision.capture.coverage import Gap
from mindspeed_precision.dump.format import Problem
from mindspeed_precision.records import Finding, Severity

_NO_PATCH = "see patches/README.md"


class Shortfalls:
    """What one rank says of its own recording.

    Args:
        rank: which.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._reasons: set[str] = set()

    def lost(self, problems: Sequence[Problem]) -> list[Finding]:
        """Return a finding for each reason for which records were lost, the first time it is met."""
        fresh = {problem.reason: problem for problem in reversed(problems)}
        fresh = {reason: one for reason, one in fresh.items() if reason not in self._reasons}
        self._reasons.update(fresh)
        return [
            _warning(
                "coverage.record_failed",
                f"a tensor could not be recorded in step {problem.step} on rank {self._rank}: {reason}",
                "training went on; report it with the message, or leave the record out by a rule of "
                "capture.rules",
                f"first: {problem.record}",
                f"{sum(one.reason == reason for one in problems)} records of that step",
            )
            for reason, problem in fresh.items()
        ]

    def capture_ended(self, failure: Failure, step: int) -> Finding:
        """Return the finding that a failure of ours, or of the disk, ended the capture."""
        return _warning(
            "coverage.capture_ended",
            f"capture ended in step {step} on rank {self._rank}: {failure.error}",
            "training went on without it; where the message does not say what to do, report these lines",
            f"in {failure.where}",
            *failure.frames,
        )

    def without_gradient(self, gaps: Sequence[Gap]) -> list[Finding]:
        """Return a finding for each trainable parameter of which no dW was seen."""
        findings = []
        for gap in gaps:
            every = len(gap.microbatches) == gap.of
            of = "any microbatch" if every else f"microbatches {list(gap.microbatches)}"
            findings.append(
                _warning(
                    "coverage.parameter_without_wgrad",
                    f"no dW of {gap.fqn} was seen in {of} of step {gap.step} on rank {self._rank}",
                    "is the parameter used? if it is, its linear has a backward that no patch covers: "
                    f"{_NO_PATCH}",
                )
            )
        return findings

    def unseen_gemms(self, steps: Mapping[str, int]) -> list[Finding]:
        """Return a finding for each linear whose backward ran while its GEMM was not seen.

        Args:
            steps: by name of the linear, the step.
        """
        return [
            _warning(
                "coverage.wgrad_operands_unseen",
                f"the GEMM that makes dW of {fqn} was not seen in step {step} on rank {self._rank}",
                f"declare a patch for the function that computes it: {_NO_PATCH}",
            )
            for fqn, step in steps.items()
        ]

    def no_forward(self) -> Finding:
        """Return the finding that the model was not trained at all."""
        return Finding(
            id="coverage.no_forward",
            severity=Severity.ERROR,
            confidence=1.0,
            title="the model was not called in train mode, with gradients, in the first step on rank "
            f"{self._rank}",
            remedy="attach the Session to the model that is trained; call model.train()",
        )


def _warning(id_: str, title: str, remedy: str, *evidence: str) -> Finding:
    return Finding(
        id=id_,
        severity=Severity.WARNING,
        confidence=1.0,
        title=title,
        evidence=evidence,
        remedy=remedy,
    )


__all__ = ["Shortfalls"]
