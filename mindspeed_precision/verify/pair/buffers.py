"""Buffers of modules before the first step: a router's bias, running statistics, tables."""

from __future__ import annotations

from mindspeed_precision.dump.reader import RankRecords
from mindspeed_precision.records import Finding, Phase, Role, Severity, TensorRecord
from mindspeed_precision.verify.pair.evidence import listed, shortened
from mindspeed_precision.verify.pair.registry import pair_check
from mindspeed_precision.verify.pair_facts import PairFacts
from mindspeed_precision.verify.registry import Answer


@pair_check(
    "weights.buffer_differs",
    holds="every buffer that both runs have holds the same bits before the first step",
    unit="buffers",
)
def buffers(facts: PairFacts) -> Answer:
    """Compare buffers rank by rank; in other layouts a rank may have another part of one."""
    if facts.other_layout:
        return Answer(exercised=0, skipped=f"the layouts differ ({facts.other_layout})")
    looked = 0
    apart: dict[str, tuple[int, TensorRecord, TensorRecord]] = {}
    for rank, records in facts.baseline.ranks.items():
        if rank not in facts.candidate.ranks:
            continue
        one, two = _initial(records), _initial(facts.candidate.ranks[rank])
        for fqn in one.keys() & two.keys():
            looked += 1
            if not one[fqn].digest.same_bits(two[fqn].digest) or one[fqn].dtype != two[fqn].dtype:
                apart.setdefault(fqn, (rank, one[fqn], two[fqn]))
    if not apart:
        return Answer(exercised=looked, applies=looked > 0)
    names = sorted(apart)
    lines = [f"{fqn}: rank {apart[fqn][0]}, {_how(*apart[fqn][1:])}" for fqn in names]
    finding = Finding(
        id="weights.buffer_differs",
        severity=Severity.ERROR,
        confidence=0.95,
        title=f"{len(names)} of {looked} buffers differ before the first step: {listed(names, 3)}",
        evidence=shortened(lines),
        remedy="load the same checkpoint in both runs; look for what updates them before the first step",
        where=apart[names[0]][1].key,
    )
    return Answer(exercised=looked, findings=(finding,), failed=len(names))


def _initial(rank: RankRecords) -> dict[str, TensorRecord]:
    kept = (r for r in rank.records if r.key.phase is Phase.INIT and r.key.role is Role.BUFFER)
    return {record.key.fqn: record for record in kept}


def _how(one: TensorRecord, two: TensorRecord) -> str:
    return f"{one.dtype} and {two.dtype}" if one.dtype != two.dtype else "other bits"
