"""Comparisons as nodes, and the look-up of what each of them consumed (``dataflow`` says by which rules)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from mindspeed_precision.align.ranges import GATHERED, Place, by_itself
from mindspeed_precision.align.stand_ins import StandIns
from mindspeed_precision.compare.verdict import direction_unseen
from mindspeed_precision.diagnose.dataflow import (
    PARAMETERS,
    UPDATED_FROM,
    Names,
    Rule,
    Source,
    When,
    Where,
    rule_for,
)
from mindspeed_precision.records import (
    NO_MICROBATCH,
    Comparison,
    Pair,
    Phase,
    RankCoordinates,
    RecordKey,
    Role,
    TensorRecord,
    Verdict,
)

_NO_PLACES: Mapping[int, Place] = {}
_STAGES = {Phase.BATCH: 0, Phase.FPROP: 1, Phase.LOSS: 2, Phase.DGRAD: 3, Phase.WGRAD: 3, Phase.ACCUMULATE: 3}


@dataclass(frozen=True, kw_only=True, eq=False)
class Node:
    """One comparison, with its place in the execution.

    Attributes:
        comparison: what was compared.
        key: identity of the record.
        rank: its rank.
        seq: its place in the rank's execution order, in the baseline where it has the record.
        bits: fingerprints on both sides; None where one side lacks the record or does not know its bits.
        place: the same as it compares over ranks (``align.ranges``).
        moment: place within its step and microbatch over all ranks: forward through the pipeline, then
        backward.
    """

    comparison: Comparison
    key: RecordKey
    rank: int
    seq: int
    bits: tuple[int, int] | None
    place: Place
    moment: tuple[int, ...]

    @property
    def diverges(self) -> bool:
        """Whether the two runs differ here beyond what the policy tolerates."""
        verdict = self.comparison.verdict
        alone = verdict is Verdict.MISSING and not isinstance(self.comparison.pair, Pair)
        apart = verdict is Verdict.INCOMPARABLE and not self.comparison.excused
        return alone or apart or verdict is Verdict.DIVERGED

    @property
    def order(self) -> tuple[int, Place, int]:
        """Order in which origins are reported: step, then execution order, then rank."""
        return self.key.step, self.place, self.rank


def make_node(
    comparison: Comparison, coordinates: RankCoordinates, places: Mapping[int, Place] = _NO_PLACES
) -> Node:
    """Place a comparison in the execution; ``places``: of its rank, by ``seq``; none: each is its own."""
    pair = comparison.pair
    record: TensorRecord = pair.baseline if isinstance(pair, Pair) else pair.record
    bits = (
        (pair.baseline.digest.fingerprint, pair.candidate.digest.fingerprint)
        if isinstance(pair, Pair) and pair.baseline.digest.exact and pair.candidate.digest.exact
        else None
    )
    stage, place = _STAGES.get(record.key.phase, 4), places.get(record.seq, by_itself(record.seq))
    pipeline = coordinates.pp_rank if stage < _STAGES[Phase.DGRAD] else -coordinates.pp_rank
    return Node(
        comparison=comparison,
        key=record.key,
        rank=pair.rank,
        seq=record.seq,
        bits=bits,
        place=place,
        moment=(stage, pipeline, *place),
    )


class Index:
    """Nodes, found by time, kind and name."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes: tuple[Node, ...] = tuple(nodes)
        self._microbatch: dict[tuple[int, int, Phase, Role], list[Node]] = defaultdict(list)
        self._step: dict[tuple[int, Phase, Role], list[Node]] = defaultdict(list)
        self._named: dict[tuple[int, Phase, Role, str], list[Node]] = defaultdict(list)
        self._history: dict[tuple[Role, str], list[Node]] = defaultdict(list)
        for node in sorted(self.nodes, key=lambda node: (node.key.step, node.key.microbatch, node.moment)):
            key = node.key
            phase = Phase.OPTIMIZER if key.phase is Phase.INIT else key.phase
            self._microbatch[key.step, key.microbatch, phase, key.role].append(node)
            self._step[key.step, phase, key.role].append(node)
            self._named[key.step, phase, key.role, key.fqn].append(node)
            self._history[key.role, key.fqn].append(node)

    def at(self, key: RecordKey, phase: Phase, role: Role, *, whole_step: bool) -> Sequence[Node]:
        """Return the nodes of the step, or of the microbatch, of ``key``, in execution order."""
        if whole_step:
            return self._step.get((key.step, phase, role), ())
        return self._microbatch.get((key.step, key.microbatch, phase, role), ())

    def named(self, key: RecordKey, phase: Phase, role: Role, fqn: str, *, whole_step: bool) -> list[Node]:
        """Return the nodes of the step, or of the microbatch, of ``key``, that are about ``fqn``."""
        nodes = self._named.get((key.step, phase, role, fqn), [])
        return nodes if whole_step else [node for node in nodes if node.key.microbatch == key.microbatch]

    def history(self, role: Role, fqn: str) -> Sequence[Node]:
        """Return the nodes of one role and name over all steps, oldest first."""
        return self._history.get((role, fqn), ())


class Graph:
    """Who consumed what, over all ranks.

    Args:
        nodes: every comparison.
        coordinates: by rank.
        parameters: by rank, the canonical names of the declared parameters, each with the names of those that
            share its storage.
        forced: steps that both runs began with one state: nothing that was before explains what they compute.
        stand_ins: for which ranks those of the nodes stand.
        gathers_late: of a parameter after a step each rank recorded its own range.
    """

    def __init__(
        self,
        nodes: Iterable[Node],
        coordinates: dict[int, RankCoordinates],
        parameters: dict[str, frozenset[str]],
        forced: frozenset[int] = frozenset(),
        stand_ins: StandIns | None = None,
        *,
        gathers_late: bool = False,
    ) -> None:
        self._gathers_late = gathers_late
        self.stand_ins = stand_ins or StandIns()
        self.all = Index(nodes)
        self.divergent = Index(node for node in self.all.nodes if node.diverges)
        self._parameters = parameters
        self._forced = forced
        self._replica = {rank: _replica(where) for rank, where in coordinates.items()}
        self._below: dict[str, list[str]] = {}
        self._linked: dict[tuple[int, int], list[Node]] = defaultdict(list)
        for node in self.divergent.nodes:
            if node.bits is not None:
                self._linked[node.bits].append(node)

    def is_parameter(self, fqn: str) -> bool:
        """Tell whether ``fqn`` is the name of a declared parameter."""
        return fqn in self._parameters

    def rule(self, node: Node) -> Rule | None:
        """Return the rule that says what ``node`` consumed."""
        return rule_for(node.key, is_parameter=self.is_parameter(node.key.fqn))

    def explanation(self, node: Node) -> Node | None:
        """Return a divergent record that ``node`` consumed; None: nothing that it consumed diverges."""
        if not isinstance(node.comparison.pair, Pair):
            earlier = next(
                (n for n in self.divergent.history(node.key.role, node.key.fqn) if _lacks_as(n, node)), None
            )
            if earlier is not None:
                return earlier
        rule = self.rule(node)
        if rule is None:
            return None
        found = next(self._content(node, rule), None)
        if found is None:
            found = self._first(node, rule.always)
        if found is None:
            found = self._first(node, self._tier(node, rule))
        if found is None and node.key.role in (Role.WGRAD, Role.BGRAD) and self.is_parameter(node.key.fqn):
            found = self._shared_gemm(node)
        return found

    def weigh(self, nodes: Iterable[Node]) -> int:
        """Return how many records some nodes are of, over all ranks."""
        return self.stand_ins.weigh((node.rank, node.key) for node in nodes)

    def consumed(self, node: Node) -> list[Node]:
        """Return every compared record that ``node`` consumed by rule, except what merely came earlier."""
        return [found for found, _ in self.consumed_on(node)]

    def consumed_on(self, node: Node) -> list[tuple[Node, tuple[int, ...]]]:
        """Return what ``consumed`` does, each with the ranks on which it is: those that it stands for."""
        rule = self.rule(node)
        if rule is None:
            return []
        sources = [*rule.always, *self._tier(node, rule)]
        near = [s for s in sources if s.when is not When.EARLIER and s.names is not Names.NEAR]
        if node.key.step in self._forced:
            near = [source for source in near if source.when is not When.STATE]
        return [
            (found, self._consumed_ranks(node, found, source))
            for source in near
            for found in self._resolve(node, source, self.all)
        ]

    def _consumed_ranks(self, node: Node, found: Node, source: Source) -> tuple[int, ...]:
        """Return the ranks on which a node consumed a record, of those for which one stands."""
        if self._everywhere(source, found):
            return self.stand_ins.of(found.rank, found.key)
        alone = source.where is Where.RANK or _same(node, found)
        return (found.rank,) if alone else self.stand_ins.near(found.rank, found.key)

    def _first(self, node: Node, sources: Iterable[Source]) -> Node | None:
        for source in sources:
            if source.when is When.STATE and node.key.step in self._forced:
                continue
            found = next(self._resolve(node, source, self.divergent), None)
            if found is None and source.when is When.STATE:
                found = self._across_gap(node, source) or self._carried(node, source)
            if found is not None:
                return found
        return None

    def _tier(self, node: Node, rule: Rule) -> tuple[Source, ...]:
        """Return the first tier of which the runs recorded anything."""
        for tier in rule.tiers:
            if any(next(self._resolve(node, source, self.all), None) is not None for source in tier):
                return tier
        return ()

    def _content(self, node: Node, rule: Rule) -> Iterator[Node]:
        """Find divergent records with the same bits, in both runs, that ``node`` may be."""
        if not rule.content or node.bits is None:
            return
        for other in self._linked[node.bits]:
            same_time = (other.key.step, other.key.microbatch) == (node.key.step, node.key.microbatch)
            earlier_step = other.key.step < node.key.step and node.key.step not in self._forced
            state = other.key.role is Role.PARAM and earlier_step
            # what one pipeline stage sends the other receives, in any order of stages where each has several
            # chunks; ranks of one stage show each other's tensors without an order, which would be a circle
            sent = other.moment[1] != node.moment[1] and other.key.role is not node.key.role
            earlier = sent or (other.rank == node.rank and other.moment < node.moment)
            if other.key.role in rule.content and (state or (same_time and earlier)):
                yield other

    def _resolve(self, node: Node, source: Source, index: Index) -> Iterator[Node]:
        for role in source.roles:
            for other in self._timed(node, source, role, index):
                if other is not node and self._reachable(node, other, source) and _slot(node, other, source):
                    yield other

    def _timed(self, node: Node, source: Source, role: Role, index: Index) -> Iterable[Node]:
        """Return the nodes that fit the source's phase, time and name."""
        key = node.key
        if source.when in (When.STATE, When.STREAM, When.PREVIOUS):
            return self._past(node, source, role, index)
        whole_step = source.when in (When.STEP, When.MICROBATCHES)
        names = self._names(key.fqn, source.names)
        if names is not None:
            return [
                n for name in names for n in index.named(key, source.phase, role, name, whole_step=whole_step)
            ]
        candidates = index.at(key, source.phase, role, whole_step=whole_step)
        if source.names is Names.BELOW:
            prefix = f"{key.fqn}." if key.fqn else ""
            candidates = [n for n in candidates if n.key.fqn.startswith(prefix) and n.key.fqn != key.fqn]
        if source.when is When.EARLIER:
            # this rank first: between ranks of one stage "earlier" is only a guess
            return chain(
                (n for n in candidates if n.rank == node.rank and n.moment < node.moment),
                (
                    n
                    for n in candidates
                    if n.rank != node.rank and n.moment < node.moment and not _same(n, node)
                ),
            )
        if source.when is When.MICROBATCHES:
            return [other for other in candidates if other.key.microbatch != NO_MICROBATCH]
        return candidates

    def _names(self, fqn: str, relation: Names) -> Iterable[str] | None:
        """Return the names that a relation allows; None: they cannot be listed."""
        if relation is Names.SAME:
            return self._parameters.get(fqn, frozenset([fqn]))
        if relation is Names.OWNER:
            owners = self._parameters.get(fqn, frozenset([fqn]))
            return sorted({name.rpartition(".")[0] for name in owners})
        if relation is Names.PARAMETERS:
            return self._parameters_below(fqn)
        if relation is Names.NEAR:
            return self._parameters_below(fqn.rpartition(".")[0])
        return None

    def _parameters_below(self, fqn: str) -> list[str]:
        if fqn not in self._below:
            prefix = f"{fqn}." if fqn else ""
            names = {name for name in self._parameters if name.startswith(prefix)}
            shared = {other for name in names for other in self._parameters[name]}
            self._below[fqn] = sorted(names | shared)
        return self._below[fqn]

    def _past(self, node: Node, source: Source, role: Role, index: Index) -> Iterator[Node]:
        """Find what a step or a microbatch started from."""
        names = self._names(node.key.fqn, source.names) or ()
        for name in names:
            before = [other for other in index.history(role, name) if _precedes(other, node)]
            if source.when is not When.STREAM:
                last = self._last_time(node, source, role, name)
                before = [other for other in before if _time(other) == last]
            yield from (n for n in before if source.when is not When.STREAM or n.key.slot == node.key.slot)

    def _last_time(self, node: Node, source: Source, role: Role, name: str) -> tuple[int, int] | None:
        """Return step and microbatch of the last record of a name that the runs have before ``node``."""
        state = source.when is When.STATE
        times = [
            _time(other)
            for other in self.all.history(role, name)
            if (other.key.step < node.key.step if state else _precedes(other, node))
        ]
        return max(times, default=None)

    def _across_gap(self, node: Node, source: Source) -> Node | None:
        """Explain a state that was not recorded just before this step by any divergence before it."""
        for name in self._names(node.key.fqn, source.names) or ():
            for role in source.roles:
                last = self._last_time(node, source, role, name)
                if last is not None and last[0] == node.key.step - 1:
                    continue
                found = next(
                    (n for n in self.divergent.nodes if n.key.step < node.key.step and _moves(n)), None
                )
                if found is not None:
                    return found
        return None

    def _carried(self, node: Node, source: Source) -> Node | None:
        """Explain a parameter that was tolerated by what went wrong in the updates that made it.

        What is tolerated in a parameter can be too much for what is computed from it. Equal bits carry
        nothing. Where a norm alone spoke for it, a wrong update of another parameter by the same optimizer
        counts too.
        """
        for state in self._resolve(node, source, self.all):
            if state.key.role not in PARAMETERS or state.comparison.verdict is Verdict.IDENTICAL:
                continue
            names = sorted(self._names(state.key.fqn, Names.SAME) or ())
            histories = [self.divergent.history(role, name) for role in UPDATED_FROM for name in names]
            if direction_unseen(state.comparison):
                histories.append(self._wrong_updates)
            found = next((n for n in chain(*histories) if n.key.step <= state.key.step), None)
            if found is not None:
                return found
        return None

    @cached_property
    def _wrong_updates(self) -> list[Node]:
        """The parameters that an update made wrong from what agrees."""
        updates = [n for n in self.divergent.nodes if n.key.phase is Phase.OPTIMIZER]
        made = [n for n in updates if n.key.role in PARAMETERS]
        return [n for n in made if not any(found.diverges for found in self.consumed(n))]

    def _shared_gemm(self, node: Node) -> Node | None:
        """Find a divergent dW of a module that uses another module's weight (a tied output layer)."""
        for other in self.divergent.at(node.key, Phase.WGRAD, node.key.role, whole_step=False):
            suffix = node.key.fqn.rpartition(".")[2]
            foreign = not self.is_parameter(other.key.fqn) and not self.is_parameter(
                f"{other.key.fqn}.{suffix}"
            )
            if other.rank == node.rank and foreign and _shape(other) == _shape(node):
                return other
        return None

    def _everywhere(self, source: Source, found: Node) -> bool:
        """Tell whether a source is on all ranks: what a range became is gathered by every replica."""
        gathered = source.where is Where.REPLICA and (found.key.phase, found.key.role) == GATHERED
        return source.where is Where.ALL or (self._gathers_late and gathered)

    def _reachable(self, node: Node, other: Node, source: Source) -> bool:
        if self._everywhere(source, other) or node.rank == other.rank:
            return True
        if source.where is Where.RANK or _same(node, other):
            return False
        return self._replica.get(node.rank) == self._replica.get(other.rank)


def _replica(where: RankCoordinates) -> int:
    """Return which replica a rank belongs to; experts tie data-parallel ranks together."""
    return where.dp_rank if where.ep_size == 1 else 0


def _precedes(one: Node, two: Node) -> bool:
    """Tell whether a record is of an earlier step, or of an earlier microbatch of the same step."""
    return _time(one) < _time(two)


def _time(node: Node) -> tuple[int, int]:
    return node.key.step, node.key.microbatch


def _lacks_as(earlier: Node, node: Node) -> bool:
    """Tell whether a side that lacks a record lacked it before: what is not trained stays untrained."""
    lacks = not isinstance(earlier.comparison.pair, Pair)
    return _precedes(earlier, node) and lacks and earlier.key.phase is node.key.phase


def _same(one: Node, two: Node) -> bool:
    """Tell whether two nodes are the same record on different ranks: none of them can explain the other."""
    return one.key == two.key


def _slot(node: Node, other: Node, source: Source) -> bool:
    same_call = (
        other.key.phase is not node.key.phase
        or source.names is not Names.SAME
        or source.when is not When.MICROBATCH
        or other.key.occurrence == node.key.occurrence
    )
    return same_call and (source.slot is None or other.key.slot == source.slot)


def _moves(node: Node) -> bool:
    """Tell whether a divergence can have moved parameters: random state and statistics of the step cannot."""
    return node.key.role is not Role.RNG and node.key.phase is not Phase.LOSS


def _shape(node: Node) -> tuple[int, ...]:
    pair = node.comparison.pair
    return (pair.baseline if isinstance(pair, Pair) else pair.record).shape
