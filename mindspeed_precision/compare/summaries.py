"""Pairs of which one side is of another tool's dump: no fingerprint, but a checksum, or four numbers.

msprobe's Max and Min are elements, and exact. Its Mean and Norm are summed and kept in a type of their own
(``Summary.roundoff``), and nothing more is known of them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

import numpy as np

from mindspeed_precision.dump.reader import Run
from mindspeed_precision.record.elements import to_numbers
from mindspeed_precision.records import Pair, Side, Summary, TensorRecord, Verdict

CRC32 = "crc32"
CRC32_WIDENED = "crc32 of float32"

Decision = tuple[Verdict, str]


def summarised(pair: Pair) -> bool:
    """Tell whether bits of a pair are not known because one side is of another tool's dump."""
    return any(_alone(record) for record in (pair.baseline, pair.candidate))


def _alone(record: TensorRecord) -> bool:
    return record.summary is not None and not record.digest.exact


def norm_slack(pair: Pair) -> float:
    """Return by how much two norms of equal tensors may differ, relative: by how a summary was computed."""
    records = (pair.baseline, pair.candidate)
    return sum(record.summary.roundoff for record in records if record.summary is not None and _alone(record))


def told_by_summaries(pair: Pair, baseline: Run, candidate: Run, *, exact: bool) -> Decision | None:
    """Decide a pair by what both sides say of their elements; None: by the bounds of the policy.

    Args:
        pair: of which ``summarised`` is true.
        baseline: the run of ``pair.baseline``, for elements of which a checksum is taken.
        candidate: the same of ``pair.candidate``.
        exact: the policy has no bounds for the pair.
    """
    same = _same_checksum(pair, baseline, candidate)
    if same:
        return Verdict.IDENTICAL, "both have one checksum of their elements"
    if same is False and exact:
        return Verdict.DIVERGED, "checksums of the elements differ"
    sides = [_numbers(record) for record in (pair.baseline, pair.candidate)]
    if sides[0] is None or sides[1] is None:
        return (Verdict.MISSING, f"nothing is known of the elements {_of_whom(sides)}") if exact else None
    one, two = sides[0], sides[1]
    if one.nonfinite or two.nonfinite:
        return _nonfinite(one, two)
    alike = _computed_alike(pair) and baseline.framework == candidate.framework
    return _equal(pair, one, two, alike=alike) if exact else None


def _of_whom(sides: list[Summary | None]) -> str:
    lacking = [side.value for side, found in zip(Side, sides, strict=True) if found is None]
    return f"in the {' and the '.join(lacking)} that the other run has, too"


def _same_checksum(pair: Pair, baseline: Run, candidate: Run) -> bool | None:
    """Compare checksums of one algorithm, one of them taken of elements; None: there are not two."""
    one, two = _checksum(pair.baseline), _checksum(pair.candidate)
    if one is None and two is not None:
        one = _taken(baseline, pair.rank, pair.baseline, two[0])
    elif two is None and one is not None:
        two = _taken(candidate, pair.rank, pair.candidate, one[0])
    if one is None or two is None or one[0] != two[0]:
        return None
    return one == two


def _checksum(record: TensorRecord) -> tuple[str, str] | None:
    found = record.summary
    return (found.algorithm, found.checksum) if found is not None and found.checksum else None


def _taken(run: Run, rank: int, record: TensorRecord, algorithm: str) -> tuple[str, str] | None:
    if record.payload is None or algorithm not in (CRC32, CRC32_WIDENED):
        return None
    host = run.ranks[rank].payload(record)
    data = to_numbers(host) if algorithm == CRC32_WIDENED else host.bits
    return algorithm, f"{zlib.crc32(np.ascontiguousarray(data).tobytes()):08x}"


def _numbers(record: TensorRecord) -> Summary | None:
    """Return what a record says of its elements, as a summary; None: nothing."""
    if record.summary is not None and _alone(record):
        found = record.summary
        return found if found.maximum is not None and found.minimum is not None else None
    statistics = record.digest.statistics
    if statistics is None:
        return None
    if statistics.nans:
        return Summary(maximum=math.nan, minimum=math.nan)
    if statistics.infs:
        return Summary(maximum=math.inf, minimum=-math.inf)
    if not record.numel:
        return None
    return Summary(
        maximum=statistics.maximum,
        minimum=statistics.minimum,
        mean=statistics.mean,
        l2_norm=statistics.l2_norm,
    )


def _nonfinite(one: Summary, two: Summary) -> Decision:
    if one.nonfinite != two.nonfinite:
        return Verdict.DIVERGED, "NaN or infinity on one side only"
    nans = [any(v is not None and math.isnan(v) for v in (s.maximum, s.minimum)) for s in (one, two)]
    if nans[0] != nans[1]:
        return Verdict.DIVERGED, "NaN on one side, infinity on the other"
    return Verdict.WITHIN_TOLERANCE, "NaN or infinity on both sides: of the other elements nothing is known"


def _equal(pair: Pair, one: Summary, two: Summary, *, alike: bool) -> Decision:
    """Demand equal numbers: to the last digit where they were computed alike, else as far as known."""
    differing = [text for text, equal in _compared(pair, one, two, alike=alike) if not equal]
    if differing:
        return Verdict.DIVERGED, "; ".join(differing)
    known = [
        name
        for name, values in zip(("Max", "Min", "Mean", "Norm"), _values(one, two), strict=True)
        if None not in values
    ]
    how = "to the last digit" if alike else "as far as they were computed alike"
    return Verdict.WITHIN_TOLERANCE, f"{', '.join(known)} equal {how}; bits are not known"


def _computed_alike(pair: Pair) -> bool:
    """Tell whether both sides' numbers were computed in one way: then equal tensors have equal ones."""
    one, two = pair.baseline, pair.candidate
    if one.summary is None or two.summary is None or not (_alone(one) and _alone(two)):
        return False
    return one.summary.roundoff == two.summary.roundoff


def _values(one: Summary, two: Summary) -> list[tuple[float | None, float | None]]:
    return [
        (one.maximum, two.maximum),
        (one.minimum, two.minimum),
        (one.mean, two.mean),
        (one.l2_norm, two.l2_norm),
    ]


def _compared(pair: Pair, one: Summary, two: Summary, *, alike: bool) -> Iterator[tuple[str, bool]]:
    """Yield each number in words, with whether it is equal."""
    slack = 0.0 if alike else norm_slack(pair)
    rms = (two.l2_norm or 0.0) / math.sqrt(max(pair.candidate.numel, 1))
    room = (0.0, 0.0, slack * (abs(two.mean or 0.0) + rms), slack * (two.l2_norm or 0.0))
    for name, (a, b), allowed in zip(("Max", "Min", "Mean", "Norm"), _values(one, two), room, strict=True):
        if a is not None and b is not None:
            yield f"{name} {a:.9g} in the baseline, {b:.9g} in the candidate", abs(a - b) <= allowed
