"""The rule about an optimizer that was called and did nothing: it needs no second run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mindspeed_precision.compare.movement import Movement, Unmoved
from mindspeed_precision.diagnose.facts import Facts, names
from mindspeed_precision.diagnose.rules.registry import rule
from mindspeed_precision.records import Finding, Phase, RecordKey, Role, Severity, Side


@rule("optimizer.parameters_unmoved")
def parameters_unmoved(facts: Facts) -> Iterable[Finding]:
    """Find parameters that a step at lr > 0, with a gradient that is not zero, left as they were.

    An error where no rounding explains it; a warning where it might, and then only if nothing at all moved.
    """
    movements = facts.movements
    failed = {side: movement.failed for side, movement in movements.items() if movement.failed}
    if failed:
        yield _finding(facts, failed, movements, Severity.ERROR)
        return
    still = {side: m.unmoved for side, m in movements.items() if m.unmoved and not m.moved}
    if still:
        yield _finding(facts, still, movements, Severity.WARNING)


def follows(facts: Facts, key: RecordKey) -> bool:
    """Tell whether a divergent record follows from a parameter that one run's optimizer left as it was.

    That is the parameter and its state in that step, and the step counter in the steps after it.
    """
    failed = [one.key for movement in facts.movements.values() for one in movement.failed]
    return any(_follows(key, unmoved) for unmoved in failed)


def _follows(key: RecordKey, unmoved: RecordKey) -> bool:
    if key.phase is not Phase.OPTIMIZER or key.fqn != unmoved.fqn:
        return False
    if key.role is Role.HYPERPARAMETER:
        return key.slot == "step" and key.step > unmoved.step
    return key.step == unmoved.step


def _finding(
    facts: Facts,
    found: dict[Side, tuple[Unmoved, ...]],
    movements: Mapping[Side, Movement],
    severity: Severity,
) -> Finding:
    first = min((one for members in found.values() for one in members), key=lambda one: one.key.step)
    where = "both runs" if len(found) == len(Side) else f"the {next(iter(found)).value}"
    certain = severity is Severity.ERROR
    unmoved = [one.key for members in found.values() for one in members]
    explained = [o.key for o in facts.origins if any(_follows(o.key, key) for key in unmoved)]
    return Finding(
        id="optimizer.parameters_unmoved",
        severity=severity,
        confidence=0.98 if certain else 0.5,
        title=f"parameters did not move at lr > 0 in {where}: {names(_fqns(found))}",
        evidence=(
            f"first: {first.key.fqn} at step {first.key.step}, lr {first.lr:.6g}, "
            + (
                "gradient not zero"
                if first.gradient is None
                else f"norm of the gradient {first.gradient:.3g}"
            )
            + ", the same bits after the step as before",
            *(_extent(side, members, movements[side]) for side, members in found.items()),
            *(() if certain else ("the update is so small that rounding may have swallowed it",)),
            *(("agreement here would prove nothing",) if len(found) == len(Side) else ()),
        ),
        remedy=f"{where}: look whether the optimizer writes into the parameters (arithmetic in place that "
        "leaves its target as it was, as on MindSpore's CPU; parameters that are copies of the model's), and "
        "use one that does"
        if certain
        else "compare steps with a larger learning rate, or keep master weights in float32",
        where=first.key,
        explains=tuple(explained),
    )


def _fqns(found: dict[Side, tuple[Unmoved, ...]]) -> list[str]:
    return list(dict.fromkeys(one.key.fqn for members in found.values() for one in members))


def _extent(side: Side, members: Sequence[Unmoved], movement: Movement) -> str:
    total = movement.moved + sum(one.ranks for one in movement.unmoved)
    count = sum(one.ranks for one in members)
    which = "all" if count == total else str(count)
    return f"in the {side.value}: {which} of {total} updates of a parameter changed nothing"
