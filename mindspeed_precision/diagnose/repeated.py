"""Whether refined runs repeat the first ones: else what they prove is proved of other runs."""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_precision.diagnose.rules.registry import given_elsewhere
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.records import Finding, RecordKey, Severity, Side
from mindspeed_precision.repeats import FirstRecord, FirstRun, first_runs_of

ID = given_elsewhere("determinism.not_repeated")


def not_repeated(baseline: Run, candidate: Run) -> list[Finding]:
    """Return a finding for each refined run that has not the bits of its first run.

    Runs that are given in the other order than the first ones are taken for what they are.

    Args:
        baseline: as it was recorded, under its own names.
        candidate: likewise.

    Raises:
        ConfigError: the manifest of a refined run was changed into something else.
    """
    runs = {Side.BASELINE: baseline, Side.CANDIDATE: candidate}
    first = {side: first_runs_of(run.manifest) for side, run in runs.items()}
    refined = [side for side in Side if first[side]]
    found = {side: _differing(runs[side], first[side][side]) for side in refined}
    if all(found.get(side) for side in Side):
        swapped = {side: _differing(runs[side], first[side][side.other]) for side in refined}
        if not any(swapped.values()):
            return []
    return [_finding(side, first[side][side], found[side]) for side in refined if found[side]]


Differing = list[tuple[FirstRecord, int | None]]
"""What was to come again, with the bits that came; None: nothing was recorded."""


def _differing(run: Run, first: FirstRun) -> Differing:
    bits = {rank: _bits(run, rank) for rank in {record.rank for record in first.records}}
    seen = [(record, bits[record.rank].get(record.key)) for record in first.records]
    return [(record, found) for record, found in seen if found != record.fingerprint]


def _bits(run: Run, rank: int) -> Mapping[RecordKey, int]:
    held = run.ranks.get(rank)
    return {} if held is None else {record.key: record.digest.fingerprint for record in held.records}


def _finding(side: Side, first: FirstRun, differing: Differing) -> Finding:
    expected, found = differing[0]
    absent = sum(bits is None for _, bits in differing)
    came = "was not recorded" if found is None else f"has the fingerprint {found:016x}"
    return Finding(
        id=ID,
        severity=Severity.ERROR,
        confidence=1.0,
        title=f"the {side.value} does not repeat the run that it refines ({first.run}): what it shows "
        "is not shown of that one",
        evidence=(
            f"{len(differing)} of {len(first.records)} records differ"
            + (f", {absent} of them were not recorded" if absent else ""),
            f"first: {expected.key.describe()}, on rank {expected.rank}, {came}, expected "
            f"{expected.fingerprint:016x}",
        ),
        remedy="start it with the command and the environment of the first run: same seed, data, versions, "
        "processes; settings other than those of the refine file",
        where=expected.key,
    )


__all__ = ["ID", "not_repeated"]
