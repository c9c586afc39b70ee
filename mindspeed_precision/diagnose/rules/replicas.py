"""Rules about what several ranks hold alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from mindspeed_precision.align.replicas import kept_equal_by
from mindspeed_precision.counting import count
from mindspeed_precision.diagnose.facts import Facts, names
from mindspeed_precision.diagnose.rules.registry import rule
from mindspeed_precision.records import NO_MICROBATCH, Finding, Phase, ReplicasDiffer, Severity, Side

_PHASES = list(Phase)


def _moment(difference: ReplicasDiffer) -> tuple[int, bool, int, int]:
    """Place a record in a step: its microbatches come first, then what is of the whole step, by phases."""
    key = difference.key
    late = key.microbatch == NO_MICROBATCH and key.phase is not Phase.BATCH
    return key.step, late, key.microbatch, _PHASES.index(key.phase)


@rule("parallel.replicas_differ")
def replicas_differ(facts: Facts) -> Iterable[Finding]:
    """Name the tensors of which ranks hold copies that are none: one finding for each run."""
    by_side: dict[Side, list[ReplicasDiffer]] = defaultdict(list)
    for difference in facts.alignment.replicas:
        by_side[difference.side].append(difference)
    for side, found in by_side.items():
        found.sort(key=_moment)
        first = found[0]
        groups = " and ".join(f"ranks {', '.join(map(str, ranks))}" for ranks in first.ranks)
        yield Finding(
            id="parallel.replicas_differ",
            severity=Severity.ERROR,
            confidence=0.97,
            title=f"{names(one.key.fqn for one in found)}: the copies on different ranks of the {side.value} "
            "differ",
            evidence=(
                f"{count(len(found), 'record')}; first: {first.key.describe()}",
                f"{groups} hold different bits",
            ),
            remedy=kept_equal_by(first.key.phase),
            where=first.key,
            explains=tuple(o.key for o in facts.origins if o.key in {one.key for one in found}),
        )
