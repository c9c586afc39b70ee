"""Rules about what enters a run: initial weights, data, random state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from mindspeed_precision.counting import count
from mindspeed_precision.diagnose.facts import Facts, fqns, names
from mindspeed_precision.diagnose.rules.registry import late_rule, rule, unexplained
from mindspeed_precision.records import Finding, Origin, Pair, Phase, RecordKey, Role, Severity, Side

_MASK64 = (1 << 64) - 1


@rule("weights.initial_differs")
def initial_weights(facts: Facts) -> Iterable[Finding]:
    """Find parameters that differ before the first step."""
    origins = facts.origins_in(Phase.INIT, Role.PARAM)
    if origins:
        total = sum(len(facts.graph.all.history(Role.PARAM, name)) > 0 for name in facts.declarations)
        yield Finding(
            id="weights.initial_differs",
            severity=Severity.ERROR,
            confidence=0.98,
            title=f"{len(origins)} of {total} parameters differ before the first step: {fqns(origins)}",
            evidence=(f"first: {origins[0].key.fqn}, {origins[0].comparison.reason}",),
            remedy="load the same checkpoint in both runs, or use the same seed and the same initialisation",
            where=origins[0].key,
            explains=tuple(origin.key for origin in origins),
        )


@rule("weights.buffer_differs")
def initial_buffers(facts: Facts) -> Iterable[Finding]:
    """Find buffers of modules that differ before the first step."""
    origins = facts.origins_in(Phase.INIT, Role.BUFFER)
    if origins:
        yield _buffers(
            facts,
            origins,
            id_="weights.buffer_differs",
            title=f"{len(origins)} buffers of modules differ before the first step: {fqns(origins)}",
            remedy="load the same checkpoint in both runs; look for what updates them before the first "
            "step, a cast, another initialisation",
        )


@rule("model.buffer_differs")
def updated_buffers(facts: Facts) -> Iterable[Finding]:
    """Find buffers of modules that a step leaves with other numbers, though what it saw agrees."""
    origins = facts.origins_in(Phase.OPTIMIZER, Role.BUFFER)
    if origins:
        yield _buffers(
            facts,
            origins,
            id_="model.buffer_differs",
            title=f"a step leaves {len(origins)} buffers of modules with other contents: {fqns(origins)}",
            remedy="compare what updates them and in which dtype they are kept: casts of the model take "
            "buffers along; reductions of counts over the ranks",
        )


def _buffers(facts: Facts, origins: list[Origin], *, id_: str, title: str, remedy: str) -> Finding:
    """Report buffers, and what their modules give from then on."""
    owners = {origin.key.fqn.rpartition(".")[0] for origin in origins}
    first = origins[0].key.step
    follows = [
        origin.key
        for origin in facts.origins
        if origin.key.fqn in owners and origin.key.step >= first and origin.key.phase is Phase.FPROP
    ]
    return Finding(
        id=id_,
        severity=Severity.ERROR,
        confidence=0.9,
        title=title,
        evidence=(f"first: {origins[0].key.describe()}: {origins[0].comparison.reason}",),
        remedy=remedy,
        where=origins[0].key,
        explains=(*(origin.key for origin in origins), *follows),
    )


@rule("data.batch_differs", "data.batch_order")
def batches(facts: Facts) -> Iterable[Finding]:
    """Find different data, and say whether it is the same data in another order."""
    origins = facts.origins_in(Phase.BATCH, Role.BATCH)
    reordered: list[Origin] = []
    different: list[Origin] = []
    for origin in origins:
        (reordered if _same_elements(facts, origin.key.slot) else different).append(origin)
    if reordered:
        yield _batch_finding(
            facts,
            reordered,
            id_="data.batch_order",
            title="the batches hold the same data in another order",
            remedy="use the same shuffle seed, sampler and number of consumed samples",
        )
    if different:
        yield _batch_finding(
            facts,
            different,
            id_="data.batch_differs",
            title="the batches hold different data",
            remedy="use the same data files, index cache, seed, split and number of consumed samples",
        )


def _same_elements(facts: Facts, slot: str) -> bool:
    """Tell whether a slot's elements over all microbatches and ranks are the same on both sides.

    The unordered fingerprint is a sum over elements, so it adds up over records.
    """
    extra = facts.alignment.stand_ins.batches.items()
    others = [both for (of, step), both in extra if of == slot and step in facts.alignment.steps]
    sums = [sum(both[side] for both in others) for side in (0, 1)]
    for node in facts.graph.all.nodes:
        pair = node.comparison.pair
        if node.key.role is Role.BATCH and node.key.slot == slot and isinstance(pair, Pair):
            sums[0] += pair.baseline.digest.unordered
            sums[1] += pair.candidate.digest.unordered
    return sums[0] & _MASK64 == sums[1] & _MASK64


def _batch_finding(facts: Facts, origins: list[Origin], *, id_: str, title: str, remedy: str) -> Finding:
    differing = [node for node in facts.graph.divergent.nodes if node.key.role is Role.BATCH]
    stand_ins = facts.alignment.stand_ins
    ranks = stand_ins.expanded((node.rank, node.key) for node in differing)
    which = (
        "all ranks"
        if len(ranks) == len(stand_ins.every(facts.alignment.ranks))
        else f"rank {names(map(str, ranks), most=8)} only"
    )
    steps: dict[int, set[int]] = defaultdict(set)
    for node in differing:
        steps[node.key.step].add(node.key.microbatch)
    first = origins[0]
    return Finding(
        id=id_,
        severity=Severity.ERROR,
        confidence=0.97,
        title=f"{title} ({which})",
        evidence=(
            f"{names(origin.key.slot for origin in origins)}: first at step {first.key.step}, "
            f"microbatch {first.key.microbatch}",
            f"{sum(map(len, steps.values()))} microbatches in {len(steps)} of "
            f"{count(len(facts.alignment.steps), 'step', 'differ')}",
        ),
        remedy=remedy,
        where=first.key,
        explains=tuple(origin.key for origin in origins),
    )


@late_rule("rng.state_differs")
def random_state(facts: Facts, findings: Sequence[Finding]) -> Iterable[Finding]:
    """Report different random state: a cause only of what nothing else accounts for."""
    differing = [node for node in facts.graph.divergent.nodes if node.key.role is Role.RNG]
    if not differing:
        return
    first = min(differing, key=lambda node: node.order)
    candidates = [key for key in unexplained(facts, findings) if _may_follow(key, first.key)]
    causes = [f for f in findings if f.severity is Severity.ERROR and f.confidence >= 0.6]
    alone = bool(candidates) or (bool(facts.origins) and not causes)
    generators = names(node.key.slot for node in differing)
    yield Finding(
        id="rng.state_differs",
        severity=Severity.WARNING if alone else Severity.INFO,
        confidence=0.55 if alone else 0.1,
        title=f"the random state differs from step {first.key.step} on: {generators}",
        evidence=(
            f"{facts.graph.weigh(differing)} states differ",
            "it matters only where a step draws from it (dropout, sampling)",
        ),
        remedy="use the same seed, and set dropout to zero while comparing",
        where=first.key,
        explains=tuple(candidates),
    )


def _may_follow(key: RecordKey, state: RecordKey) -> bool:
    random = key.phase is Phase.FPROP or key.role is Role.RNG
    return random and key.step >= state.step


@rule("nonfinite.first")
def nonfinite(facts: Facts) -> Iterable[Finding]:
    """Find the first NaN or infinity that one run alone has, from finite inputs."""
    for side in Side:
        bad = [node for node in facts.graph.divergent.nodes if _nonfinite_alone(node.comparison.pair, side)]
        if not bad:
            continue
        first = min(bad, key=lambda node: node.order)
        pair = first.comparison.pair
        assert isinstance(pair, Pair)
        record = pair.baseline if side is Side.BASELINE else pair.candidate
        assert record.digest.statistics is not None
        nans, infs = record.digest.statistics.nans, record.digest.statistics.infs
        is_origin = any(origin.key == first.key for origin in facts.origins)
        yield Finding(
            id="nonfinite.first",
            severity=Severity.ERROR,
            confidence=0.9,
            title=f"{first.key.fqn or '(model)'} {first.key.role.value} is the first not finite number, "
            f"in the {side.value} only",
            evidence=(f"{nans} NaN and {infs} Inf of {record.numel} elements", "what it consumed is finite"),
            remedy="look at this operation's inputs: overflow of the dtype, a division by zero, a "
            "log of zero",
            where=first.key,
            explains=(first.key,) if is_origin else (),
        )


def _nonfinite_alone(pair: object, side: Side) -> bool:
    if not isinstance(pair, Pair):
        return False
    mine, other = (
        (pair.baseline, pair.candidate) if side is Side.BASELINE else (pair.candidate, pair.baseline)
    )
    one, two = mine.digest.statistics, other.digest.statistics
    if one is None or two is None:
        return False
    return one.nans + one.infs > 0 and two.nans + two.infs == 0
