"""The lines on stderr: one at the start, one where something is wrong, a summary at the end."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mindspeed_precision.config import Settings
from mindspeed_precision.counting import count
from mindspeed_precision.live.expectation import Expectation, Shape
from mindspeed_precision.records import Finding, Severity

_PREFIX = "mindspeed-precision:"


def tell(line: str) -> None:
    """Write a line where a person looks while a training runs."""
    sys.stderr.write(f"{_PREFIX} {line}\n")
    sys.stderr.flush()


def start_line(
    settings: Settings, expected: Expectation, shape: Shape, *, world_size: int, known: bool
) -> str:
    """Say what will be recorded, and about what that costs.

    Args:
        settings: of the run.
        expected: of a step of this rank.
        shape: of the model on this rank.
        world_size: ranks of the run.
        known: the loop says how many microbatches a step has.
    """
    parts = [
        f"recording to {settings.out}: {_steps(settings)}, {_ranks(settings, world_size)}, "
        + _level(settings),
        f"about {amount(expected.records)} records and {byte_text(expected.index_bytes)} a step and rank"
        + _payload(expected),
    ]
    if expected.seconds:
        parts.append(f"overhead at most about {_seconds(expected.seconds)} a step")
    numel = sum(_numel(dims) for _, dims, _ in shape.parameters)
    batches = f"{count(shape.microbatches, 'microbatch')}" if known else "one microbatch a step assumed"
    trainable = f"{amount(len(shape.parameters))} trainable parameters ({amount(numel)} elements)"
    parts.append(f"counted from {trainable}, {batches}")
    return "; ".join(parts)


def _steps(settings: Settings) -> str:
    return f"steps {settings.steps.text}" if settings.steps.text else "every step"


def _ranks(settings: Settings, world_size: int) -> str:
    asked = sum(rank in settings.ranks for rank in range(world_size))
    return f"rank {settings.ranks.text or 0}" if asked == 1 else f"{asked} of {world_size} ranks"


def _level(settings: Settings) -> str:
    rules = settings.capture.rules
    more = f" and {len(rules)} rule{'s' if len(rules) > 1 else ''}" if rules else ""
    return f"level {settings.capture.level.value}{more}"


def _payload(expected: Expectation) -> str:
    if not expected.payload_bytes and not expected.unsized:
        return ""
    unsized = f" and {count(expected.unsized, 'tensor')} of unknown size" if expected.unsized else ""
    return f", elements of about {byte_text(expected.payload_bytes)} in the first one{unsized}"


def finding_lines(findings: Iterable[Finding], told: set[str], *, where: str) -> list[str]:
    """Return a line for each kind of finding that was not told before.

    Args:
        findings: in the order in which they were found.
        told: ids that were told; those of the result are added.
        where: the step and rank, for a person.
    """
    bad = [one for one in findings if one.severity is not Severity.INFO and one.id not in told]
    counts = Counter(finding.id for finding in bad)
    lines = []
    for finding in bad:
        if finding.id in told:
            continue
        told.add(finding.id)
        more = f" (and {counts[finding.id] - 1} more)" if counts[finding.id] > 1 else ""
        lines.append(f"{finding.severity.value}: {where}: {finding.title}{more} [{finding.id}]")
    return lines


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a rank has recorded when it ends.

    Attributes:
        steps: the recorded ones, in order.
        records: lines about tensors and numbers.
        bytes: written, of lines and elements.
        payload_bytes: of those, elements.
        seconds: at the ends of steps: waiting for digests, writing lines.
        parameters: trainable ones of this rank.
        gaps: of those, the ones of which no dW was seen in some microbatch.
        wgrad: dW is recorded at all.
        rank: which.
        ranks: how many recorded.
    """

    steps: Sequence[int]
    records: int
    bytes: int
    payload_bytes: int
    seconds: float
    parameters: int
    gaps: int
    wgrad: bool
    rank: int
    ranks: int


def summary_lines(
    settings: Settings, told: Told, findings: Sequence[Finding], *, warnings: int, error: str = ""
) -> list[str]:
    """Return what a person is told when the training has ended.

    Args:
        settings: of the run.
        told: of this rank.
        findings: of this rank.
        warnings: lines that were told while it ran.
        error: what ended the training, where it did not end well.
    """
    bad = Counter(finding.id for finding in findings if finding.severity is not Severity.INFO)
    elements = f" ({byte_text(told.payload_bytes)} of them elements)" if told.payload_bytes else ""
    coverage = "dW was not recorded (capture.wgrad=false)"
    if told.wgrad:
        seen = told.parameters - told.gaps
        coverage = (
            f"dW of {amount(seen)} of {amount(told.parameters)} trainable parameters seen in every microbatch"
        )
    lines = [f"stopped by {error}; what was whole before is kept"] if error else []
    lines.append(
        f"recorded {_step_text(told.steps)} to {settings.out}; "
        f"{_rank_text(told)}: "
        f"{amount(told.records)} records, {byte_text(told.bytes)}{elements}, "
        f"{_seconds(told.seconds)} at the ends of steps; {coverage}"
    )
    if bad or warnings:
        named = ", ".join(f"{id_} ({number})" for id_, number in bad.most_common())
        lines.append(
            f"{amount(warnings)} warning{'' if warnings == 1 else 's'} while it ran; "
            f"findings: {named or 'none'}"
        )
    against = settings.reference or "BASELINE"
    lines.append(
        f"next: mindspeed-precision check {settings.out}; "
        f"mindspeed-precision compare {against} {settings.out}"
    )
    return lines


def _rank_text(told: Told) -> str:
    return f"rank {told.rank}" if told.ranks == 1 else f"rank {told.rank} (of {told.ranks} that recorded)"


def _step_text(steps: Sequence[int]) -> str:
    if not steps:
        return "no step"
    if len(steps) == 1:
        return f"step {steps[0]}"
    dense = steps[-1] - steps[0] + 1 == len(steps)
    return f"{amount(len(steps))} steps ({steps[0]} {'to' if dense else '…'} {steps[-1]})"


def _numel(dims: Iterable[int]) -> int:
    size = 1
    for dim in dims:
        size *= dim
    return size


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def byte_text(number: int) -> str:
    """Write a number of bytes to two digits: ``2.6 MB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.2g} {unit}" if number < 10 * size else f"{number / size:.0f} {unit}"
    return f"{number} B"


def amount(number: int) -> str:
    """Write a number with its thousands apart."""
    return f"{number:,}".replace(",", " ")


__all__ = ["Told", "amount", "byte_text", "finding_lines", "start_line", "summary_lines", "tell"]
