"""What was looked at: dW of every trainable parameter, in every microbatch of every compared step."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_precision.align.compatible import other_tool
from mindspeed_precision.diagnose.facts import Facts
from mindspeed_precision.dump.reader import RankRecords
from mindspeed_precision.records import FUSED_DIFFERENCE, Coverage, Phase, Role, Side, TensorRecord


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A trainable parameter of which dW was not seen, at the first such place."""

    fqn: str
    side: Side
    rank: int
    step: int
    microbatch: int


def gaps(facts: Facts) -> list[Gap]:
    """Return one gap per trainable parameter without dW somewhere, in order of declaration."""
    found: dict[str, Gap] = {}
    for side, run in ((Side.BASELINE, facts.baseline), (Side.CANDIDATE, facts.candidate)):
        for number in facts.alignment.ranks:
            if facts.alignment.stand_ins.of_ranges_alone(number):
                continue
            rank = run.ranks[number]
            seen = _seen(rank) | (_accumulated(rank) if other_tool(run) else set())
            for parameter in rank.parameters:
                if not parameter.trainable or parameter.tied_to or not rank.holds(parameter.fqn):
                    continue
                place = _first_missing(rank, parameter.fqn, seen, facts.alignment.steps)
                if place is not None:
                    gap = Gap(fqn=parameter.fqn, side=side, rank=number, step=place[0], microbatch=place[1])
                    found.setdefault(parameter.fqn, gap)
    return list(found.values())


def _seen(rank: RankRecords) -> set[tuple[str, int, int]]:
    return {
        (_parameter(record), record.key.step, record.key.microbatch)
        for record in rank.records
        if record.key.phase is Phase.WGRAD and record.key.role in (Role.WGRAD, Role.BGRAD)
    }


def _accumulated(rank: RankRecords) -> set[tuple[str, int, int]]:
    """Return where dW was seen as what it was added to: a dump of msprobe has it no sooner."""
    keys = (record.key for record in rank.records)
    return {
        (key.fqn, key.step, key.microbatch)
        for key in keys
        if key.phase is Phase.ACCUMULATE and key.slot == "after"
    }


def _parameter(record: TensorRecord) -> str:
    """Return whose gradient it is: a GEMM that adds dW straight to main_grad records its module alone."""
    fused = record.note == FUSED_DIFFERENCE
    return f"{record.key.fqn}.weight" if fused else record.key.fqn


def _first_missing(
    rank: RankRecords, fqn: str, seen: set[tuple[str, int, int]], steps: tuple[int, ...]
) -> tuple[int, int] | None:
    places = ((step, microbatch) for step in steps for microbatch in range(rank.microbatches.get(step, 0)))
    return next((place for place in places if (fqn, *place) not in seen), None)


def coverage_of(facts: Facts) -> Coverage:
    """Count what was looked at."""
    trainable = {
        name
        for name, sides in facts.declarations.items()
        if any(parameter.trainable and not parameter.tied_to for parameter in sides.values())
    }
    missing = {gap.fqn for gap in gaps(facts)} | set(facts.trained_on_one_side)
    weigh = facts.alignment.stand_ins.weigh
    alone = weigh((u.rank, u.key) for u in facts.alignment.unmatched if u.side is Side.CANDIDATE)
    matched = weigh((pair.rank, pair.key) for pair in facts.alignment.pairs)
    return Coverage(
        parameters=len(trainable),
        parameters_with_wgrad=len(trainable - missing),
        records=matched + alone,
        matched=matched,
        unmatched=weigh((u.rank, u.key) for u in facts.alignment.unmatched),
    )
