"""The divergent window: whose elements a second run must keep so that a replay can tell why the runs part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from mindspeed_precision.compare.routes import REROUTED
from mindspeed_precision.diagnose.facts import Facts
from mindspeed_precision.records import (
    INIT_STEP,
    NO_MICROBATCH,
    Comparison,
    Finding,
    Origin,
    Pair,
    Phase,
    RecordKey,
    Role,
    Side,
)

_MOST = 8
"""Origins whose window is kept, and suspected operations: a fault shows itself in each of them."""
_MOST_CONSUMED = 16
"""A record of more than so many (a norm of all gradients) is not recomputed from them."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Some records of one moment.

    Attributes:
        step: of them; ``INIT_STEP`` for initial parameters.
        phase: of them.
        fqn: shell pattern, on names as aligned.
        role: shell pattern.
        microbatch: of them; None for every one.
        ranks: of either run, that hold them.
    """

    step: int
    phase: Phase
    fqn: str
    role: str
    microbatch: int | None
    ranks: frozenset[int]

    def holds(self, key: RecordKey, ranks: frozenset[int]) -> bool:
        """Tell whether a record, and all that hold it, are in this place."""
        return (
            (key.step, key.phase) == (self.step, self.phase)
            and self.microbatch in (None, key.microbatch)
            and ranks <= self.ranks
            and fnmatchcase(key.role.value, self.role)
            and fnmatchcase(key.fqn, self.fqn)
        )


def divergent_window(facts: Facts, findings: Sequence[Finding]) -> list[Place]:
    """Return the window of the first divergent step; empty where nothing diverges, or the start does.

    Of each origin, on its first rank: for dW the GEMM, both operands and the result; for an accumulation
    main_grad before and after it, and dW as it arrived; for a gradient that flows back, the gradients of the
    module and of those beside it; for anything else the records of the module, or of the parameter, in that
    phase. With it what the record consumed: inputs, and the parameters that the step began with. And what
    tells whether a token was sent to another expert by rounding, which would explain what lies behind.
    """
    first = facts.origins[0] if facts.origins else None
    if first is None or first.key.step == INIT_STEP:
        return []
    places: dict[Place, None] = {}
    for finding in [finding for finding in findings if _suspected(finding)][:_MOST]:
        assert finding.where is not None
        places.update(dict.fromkeys(_operation(finding.where, None, _everywhere(facts, finding.where))))
    for origin in _chosen([origin for origin in facts.origins if origin.key.step == first.key.step]):
        key, ranks = origin.key, _holders(origin.comparison)
        microbatch = None if key.microbatch == NO_MICROBATCH else key.microbatch
        places.update(dict.fromkeys(_operation(key, microbatch, ranks)))
        places.update(dict.fromkeys(_consumed(facts, origin, list(places))))
    places.update(dict.fromkeys(_routes(facts, first.key.step)))
    return _joined(places)


def _suspected(finding: Finding) -> bool:
    """Tell whether a finding names a record, perhaps before the first divergence, to be looked at."""
    unproved = finding.id.startswith("layout.noncontiguous") and not finding.proved_by_replay
    return unproved and finding.where is not None


def _chosen(origins: Sequence[Origin]) -> list[Origin]:
    """Return so many origins, each in its first microbatch: one of each kind, then the others, in order."""
    once: dict[RecordKey, Origin] = {}
    for origin in origins:
        once.setdefault(replace(origin.key, microbatch=NO_MICROBATCH, occurrence=0), origin)
    kinds: dict[tuple[Phase, Role], RecordKey] = {}
    for key in once:
        kinds.setdefault((key.phase, key.role), key)
    chosen = set(list(dict.fromkeys([*kinds.values(), *once]))[:_MOST])
    return [origin for key, origin in once.items() if key in chosen]


def _holders(comparison: Comparison) -> frozenset[int]:
    """Return the ranks, of both runs, that hold a record."""
    pair = comparison.pair
    held = pair.held_by if isinstance(pair, Pair) else {}
    return frozenset(rank for side in Side for rank in held.get(side, (pair.rank,)))


def _everywhere(facts: Facts, key: RecordKey) -> frozenset[int]:
    nodes = (facts.nodes.get((rank, key)) for rank in facts.alignment.ranks)
    held = frozenset().union(*(_holders(node.comparison) for node in nodes if node is not None))
    return frozenset(facts.alignment.stand_ins.expanded((rank, key) for rank in held))


def _operation(key: RecordKey, microbatch: int | None, ranks: frozenset[int]) -> Iterator[Place]:
    """Yield where the record, and what is beside it in one operation, are."""
    owner = key.fqn.rpartition(".")[0]
    names: tuple[tuple[str, Phase], ...] = ((key.fqn, key.phase),)
    if key.phase is Phase.WGRAD and key.role in (Role.WGRAD, Role.BGRAD):
        about_parameter = key.fqn.endswith((".weight", ".bias"))
        names = ((owner if about_parameter else key.fqn, key.phase), *names)
    elif key.phase is Phase.ACCUMULATE:
        names = (*names, (key.fqn, Phase.WGRAD))
    elif key.phase is Phase.DGRAD and owner:  # what its neighbours sent back is what it was made of
        names = (*names, (f"{owner}.*", key.phase))
    for fqn, phase in names:
        yield Place(step=key.step, phase=phase, fqn=fqn, role="*", microbatch=microbatch, ranks=ranks)


def _consumed(facts: Facts, origin: Origin, places: Sequence[Place]) -> Iterator[Place]:
    """Yield what an origin was computed from, where that is not in a place already."""
    consumed = facts.graph.consumed_on(facts.node_of(origin))
    every = [(node, rank) for node, ranks in consumed for rank in ranks]
    for node, rank in every if len(every) <= _MOST_CONSUMED else ():
        pair = node.comparison.pair
        stands_for_others = rank != pair.rank
        key, ranks = node.key, frozenset([rank]) if stands_for_others else _holders(node.comparison)
        if any(place.holds(key, ranks) for place in places) or key.role is Role.HYPERPARAMETER:
            continue
        yield Place(
            step=key.step,
            phase=key.phase,
            fqn=key.fqn,
            role=key.role.value,
            microbatch=None if key.microbatch == NO_MICROBATCH else key.microbatch,
            ranks=ranks,
        )


def _routes(facts: Facts, step: int) -> Iterator[Place]:
    """Yield what judges routes that differ, where no elements were kept, and what their tokens became."""
    nodes = (node for node in facts.graph.all.nodes if node.key.step == step)
    unjudged = [n for n in nodes if n.comparison.excused and n.comparison.metrics.get(REROUTED) == 0]
    begun = step - 1 if step - 1 in facts.alignment.steps else INIT_STEP
    phase = Phase.INIT if begun == INIT_STEP else Phase.OPTIMIZER
    for node in unjudged[:_MOST]:
        router, ranks = node.key.fqn, _holders(node.comparison)
        experts = router.rpartition(".")[0]
        layer = experts.rpartition(".")[0]
        for fqn, role in ((router, "*"), (experts, Role.OUTPUT.value), (layer, Role.OUTPUT.value)):
            yield Place(
                step=step, phase=Phase.FPROP, fqn=fqn, role=role, microbatch=node.key.microbatch, ranks=ranks
            )
        yield Place(
            step=begun, phase=phase, fqn=f"{router}.*", role=Role.PARAM.value, microbatch=None, ranks=ranks
        )


def _joined(places: Iterable[Place]) -> list[Place]:
    """Join places that differ by ranks alone."""
    ranks: dict[Place, frozenset[int]] = {}
    for place in places:
        alike = replace(place, ranks=frozenset())
        ranks[alike] = ranks.get(alike, frozenset()) | place.ranks
    return [replace(alike, ranks=found) for alike, found in ranks.items()]
