"""What rules reason over: the origins, what they consumed, and what the two runs say of themselves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mindspeed_precision.align.forced import loaded_states
from mindspeed_precision.align.match import Alignment
from mindspeed_precision.align.ranges import Place
from mindspeed_precision.compare.movement import Movement, movement_of
from mindspeed_precision.compare.policy import Policy
from mindspeed_precision.compare.verdict import BITS_DIFFER
from mindspeed_precision.diagnose.graph import Graph, Node
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.record.sketch import BUCKETS
from mindspeed_precision.records import (
    Comparison,
    Layout,
    Origin,
    Pair,
    ParameterDeclaration,
    Phase,
    RankCoordinates,
    RecordKey,
    Role,
    Side,
    Verdict,
)

_EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
"""Unit roundoff (relative error of one rounding to nearest)."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything that is known of two aligned and compared runs.

    Attributes:
        baseline: the run to agree with.
        candidate: the run that is examined.
        alignment: what was compared and what could not be.
        policy: what counts as aligned.
        graph: every comparison, linked by what it consumed.
        origins: where divergences start, first one first.
        notes: what a reader must know of the bounds that decided.
        recorded: by side, the run with all its ranks, where some stand for others; empty: no rank does.
        places: by side and rank, where records come that are compared over ranks (``align.ranges``).
    """

    baseline: Run
    candidate: Run
    alignment: Alignment
    policy: Policy
    graph: Graph
    origins: tuple[Origin, ...]
    notes: tuple[str, ...] = ()
    recorded: Mapping[Side, Run] = field(default_factory=dict)
    places: Mapping[tuple[Side, int], Mapping[int, Place]] = field(default_factory=dict)

    @property
    def whole(self) -> Mapping[Side, Run]:
        """Both runs, by side, with all their ranks."""
        return self.recorded or {Side.BASELINE: self.baseline, Side.CANDIDATE: self.candidate}

    @cached_property
    def nodes(self) -> Mapping[tuple[int, RecordKey], Node]:
        """Every comparison by rank and key; of copies that differ one that diverges, where one does."""
        ordered = sorted(self.graph.all.nodes, key=lambda node: node.diverges)
        return {(node.rank, node.key): node for node in ordered}

    @cached_property
    def coordinates(self) -> RankCoordinates:
        """Where the first compared rank sits: its sizes are those of the run."""
        return self.candidate.ranks[self.alignment.ranks[0]].coordinates

    @property
    def microbatches(self) -> int:
        """Microbatches of the first compared step."""
        rank = self.candidate.ranks[self.alignment.ranks[0]]
        return rank.microbatches.get(self.alignment.steps[0], 1)

    @cached_property
    def declarations(self) -> Mapping[str, Mapping[Side, ParameterDeclaration]]:
        """Declared parameters by canonical name and side."""
        found: dict[str, dict[Side, ParameterDeclaration]] = {}
        for side, run in ((Side.BASELINE, self.baseline), (Side.CANDIDATE, self.candidate)):
            for rank in self.alignment.ranks:
                for parameter in run.ranks[rank].parameters:
                    found.setdefault(parameter.fqn, {}).setdefault(side, parameter)
        return found

    @cached_property
    def movements(self) -> Mapping[Side, Movement]:
        """What the optimizer of each run did to the parameters in the compared steps."""
        where = self.alignment.ranks, self.alignment.steps
        runs = {Side.BASELINE: self.baseline, Side.CANDIDATE: self.candidate}
        loaded = {side: loaded_states(run).keys() & self.alignment.forced for side, run in runs.items()}
        return {
            side: movement_of(
                run,
                *where,
                {step: None if step in loaded[side.other] else runs[side.other] for step in loaded[side]},
                weight=self.alignment.stand_ins.updated,
            )
            for side, run in runs.items()
        }

    @cached_property
    def trained_on_one_side(self) -> Mapping[str, Side]:
        """Parameters that one run alone trains, with that run: by declaration, or because it alone has dW."""
        found: dict[str, Side] = {}
        for name, sides in self.declarations.items():
            trainable = [side for side, parameter in sides.items() if parameter.trainable]
            if len(sides) == len(Side) and len(trainable) == 1:
                found[name] = trainable[0]
        for origin in self.origins:
            pair = origin.comparison.pair
            if not isinstance(pair, Pair) and origin.key.role in (Role.WGRAD, Role.BGRAD):
                parameter = self.parameter_of(origin.key)
                if parameter is not None:
                    found.setdefault(parameter, pair.side)
        return found

    def parameter_of(self, key: RecordKey) -> str | None:
        """Return the declared parameter that a gradient record is about."""
        suffix = "bias" if key.role is Role.BGRAD else "weight"
        names = (key.fqn, f"{key.fqn}.{suffix}")
        return next((name for name in names if name in self.declarations), None)

    def node_of(self, origin: Origin) -> Node:
        """Return the origin's node on its first rank."""
        return self.nodes[origin.ranks[0], origin.key]

    def origins_in(self, phase: Phase, *roles: Role) -> list[Origin]:
        """Return the origins of a phase and some roles that both runs recorded, of what agrees."""
        return [
            origin
            for origin in self.origins
            if origin.key.phase is phase
            and origin.key.role in roles
            and not origin.own
            and origin.comparison.verdict is Verdict.DIVERGED
        ]

    def operands(self, origin: Origin) -> list[Pair]:
        """Return the operands of the GEMM of a wgrad origin, grad_output first; empty where not recorded."""
        consumed = self.graph.consumed(self.node_of(origin))
        roles = (Role.GRAD_OUTPUT, Role.INPUT)
        found = [node for node in consumed if node.key.phase is Phase.WGRAD and node.key.role in roles]
        found.sort(key=lambda node: roles.index(node.key.role))
        return [node.comparison.pair for node in found if isinstance(node.comparison.pair, Pair)]

    def product(self, origin: Origin) -> bool:
        """Tell whether dW as a GEMM gave it is among what an origin was computed from, and so agrees."""
        consumed = self.graph.consumed(self.node_of(origin))
        return any(node.key.phase is Phase.WGRAD and node.key.role is Role.WGRAD for node in consumed)

    def setting(self, side: Side, section: str, name: str) -> Any:
        """Return one entry of a section of a run's manifest; None where it has none."""
        found = (self.baseline if side is Side.BASELINE else self.candidate).manifest.get(section)
        return found.get(name) if isinstance(found, dict) else None


def trained_names(run: Run, ranks: Iterable[int]) -> frozenset[str]:
    """Return the parameters of which a run recorded anything that only training leaves."""
    phases = (Phase.ACCUMULATE, Phase.REDUCE, Phase.CLIP)
    states = (Role.HYPERPARAMETER, Role.EXP_AVG, Role.EXP_AVG_SQ)
    return frozenset(
        record.key.fqn
        for rank in ranks
        for record in run.ranks[rank].records
        if record.key.phase in phases or record.key.role in states
    )


def pair_of(comparison: Comparison) -> Pair:
    """Return the pair of a comparison that both runs have."""
    assert isinstance(comparison.pair, Pair), comparison.key
    return comparison.pair


def names(items: Iterable[str], *, most: int = 4) -> str:
    """List some names, and how many more there are."""
    listed = list(dict.fromkeys(items))
    rest = len(listed) - most
    return ", ".join(listed[:most]) + (f" and {rest} more" if rest > 0 else "")


def fqns(origins: Iterable[Origin]) -> str:
    """List the names of origins."""
    return names(origin.key.fqn or "(model)" for origin in origins)


def reason(origin: Origin) -> tuple[str, ...]:
    """Return a line of evidence with the verdict's reason, where it says more than that bits differ."""
    text = origin.comparison.reason
    return () if text == BITS_DIFFER else (text,)


def concerns(origins: Sequence[Origin]) -> tuple[str, ...]:
    """Return a line of evidence that lists the origins of one cause; none where there is but one."""
    several = len({origin.key.fqn for origin in origins}) > 1
    return (f"it concerns {fqns(origins)}",) if several else ()


def describe_layout(layout: Layout) -> str:
    """Describe strides as a person would."""
    kind = "contiguous" if layout.contiguous else "not contiguous"
    storage = f", format {layout.format}" if layout.format else ""
    offset = f", offset {layout.storage_offset}" if layout.storage_offset else ""
    return f"strides {layout.stride} ({kind}{offset}{storage})"


def same_layout(one: Layout | None, two: Layout | None) -> bool | None:
    """Tell whether two layouts agree; None where one is not known."""
    if one is None or two is None:
        return None
    return one == two


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The candidate is a multiple of the baseline.

    Attributes:
        factor: the multiple.
        measured: whether elements or sketches say so; else norm and extrema do.
        source: what says so.
    """

    factor: float
    measured: bool
    source: str


def scale_of(comparison: Comparison) -> Scale | None:
    """Recognise a tensor that is a multiple of the other side's, beyond what rounding can do.

    With elements: what is left after the best factor (α = ⟨a, b⟩ / ⟨a, a⟩) is rounding, and α is many
    standard errors away from 1; with sketches the same, of 256 sums. Else: norm, minimum and maximum move by
    one factor.
    """
    metrics = comparison.metrics
    epsilon = _EPSILON.get(pair_of(comparison).candidate.dtype)
    if epsilon is None or metrics.get("permutation"):
        return None
    if "scale" in metrics and "scale_residual" in metrics:
        factor, residual = float(metrics["scale"]), float(metrics["scale_residual"])
        return _measured_scale(factor, residual, int(metrics["elements"]), epsilon, "the elements")
    if "sketch_scale" in metrics:
        factor, residual = float(metrics["sketch_scale"]), float(metrics["sketch_residual"])
        numbers = min(pair_of(comparison).candidate.numel, BUCKETS)
        return _measured_scale(factor, residual, numbers, epsilon, "the sketches")
    return _scale_from_statistics(comparison, epsilon)


def _measured_scale(
    factor: float, residual: float, numbers: int, epsilon: float, source: str
) -> Scale | None:
    deviation = abs(factor - 1)
    standard_error = residual / math.sqrt(max(numbers, 1))
    rounding = residual <= 4 * epsilon and deviation >= 12 * standard_error and deviation >= epsilon / 16
    if numbers > 1 and (rounding or deviation > 20 * residual) and deviation > 1e-6:
        return Scale(factor=factor, measured=True, source=source)
    return None


def _scale_from_statistics(comparison: Comparison, epsilon: float) -> Scale | None:
    pair = pair_of(comparison)
    one, two = pair.baseline.digest.statistics, pair.candidate.digest.statistics
    if one is None or two is None or not one.l2_norm or pair.baseline.numel < 2:
        return None
    if one.counted and two.counted and one.zeros != two.zeros:
        return None
    factor = two.l2_norm / one.l2_norm
    slack = 4 * epsilon + 1e-6
    low, high = (one.minimum, one.maximum) if factor > 0 else (one.maximum, one.minimum)
    fits = abs(two.minimum - factor * low) <= slack * abs(low) and abs(
        two.maximum - factor * high
    ) <= slack * abs(high)
    if not fits or abs(factor - 1) <= max(2e-4, slack / 4):
        return None
    return Scale(factor=factor, measured=False, source="norm, minimum and maximum alone")


def describe_factor(facts: Facts, factor: float) -> str:
    """Write a factor, with what it may come from where a size of the run gives it."""
    sizes = {
        "the number of microbatches": facts.microbatches,
        "the tensor-parallel size": facts.coordinates.tp_size,
        "the data-parallel size": facts.coordinates.dp_size,
        "the context-parallel size": facts.coordinates.cp_size,
    }
    known = [name for name, size in sizes.items() if size > 1 and math.isclose(factor, size, rel_tol=1e-3)]
    known += [
        f"1 / {name}"
        for name, size in sizes.items()
        if size > 1 and math.isclose(factor, 1 / size, rel_tol=1e-3)
    ]
    return f"{factor:.6g}" + (f", which is {' or '.join(known)}" if known else "")


def tolerated(verdict: Verdict) -> bool:
    """Tell whether a verdict lets a pair pass."""
    return verdict in (Verdict.IDENTICAL, Verdict.WITHIN_TOLERANCE)
