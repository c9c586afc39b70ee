"""From an alignment to a diagnosis: compare every pair, find the origins, apply the rules, conclude."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from mindspeed_precision.align.match import Alignment
from mindspeed_precision.align.ranges import execution_of, gather_late
from mindspeed_precision.compare import Calibration, Policy, compare_pair, make_context
from mindspeed_precision.compare.cancellation import GRADIENT_ROLES
from mindspeed_precision.compare.gain import Gains
from mindspeed_precision.compare.routes import REROUTED
from mindspeed_precision.compare.verdict import CANCELS, direction_unseen, order_unseen
from mindspeed_precision.counting import agree, count
from mindspeed_precision.diagnose.acceptance import accept
from mindspeed_precision.diagnose.coverage import coverage_of
from mindspeed_precision.diagnose.divergence import find_origins
from mindspeed_precision.diagnose.facts import Facts, trained_names
from mindspeed_precision.diagnose.facts import names as listed
from mindspeed_precision.diagnose.graph import Graph, make_node
from mindspeed_precision.diagnose.own_faults import OwnFaults
from mindspeed_precision.diagnose.reported import reported_findings
from mindspeed_precision.diagnose.rules import run_rules
from mindspeed_precision.diagnose.scalars import loss_error, step_scalars
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.progress import Progress, silent, watched
from mindspeed_precision.records import (
    Comparison,
    Diagnosis,
    Finding,
    Pair,
    Phase,
    Role,
    Severity,
    Side,
    StepScalars,
    Unmatched,
    Verdict,
)

_GRADIENTS = {Role.WGRAD, Role.BGRAD, Role.REDUCED_GRAD}


def gather_facts(
    baseline: Run,
    candidate: Run,
    alignment: Alignment,
    *,
    policy: Policy,
    calibration: Calibration | None = None,
    recorded: Sequence[Run] = (),
    progress: Progress = silent,
) -> Facts:
    """Compare every pair and find where divergences start.

    Args:
        baseline: the run to agree with.
        candidate: the run that is examined.
        alignment: of the two.
        policy: what counts as aligned.
        calibration: bounds that take the place of the policy's.
        recorded: both runs with all their ranks, where some stand for others.
        progress: is told how many pairs were compared.

    Raises:
        DumpError: a payload that an index promises cannot be read.
    """
    context = make_context(
        baseline,
        candidate,
        alignment.pairs,
        policy,
        calibration=calibration,
        forced=alignment.forced,
    )
    comparisons = [
        compare_pair(pair, policy=policy, baseline=baseline, candidate=candidate, context=context)
        for pair in watched(alignment.pairs, progress, "comparing", len(alignment.pairs))
    ]
    notes = list(context.notes) if context is not None else []
    notes += calibration.notes(comparisons) if calibration is not None else []
    comparisons += _missing_gradients(baseline, candidate, alignment)
    coordinates = {rank: candidate.ranks[rank].coordinates for rank in alignment.ranks}
    late = gather_late(baseline, candidate)
    places = {
        (side, rank): execution_of(run.ranks[rank], late=late)
        for side, run in zip(Side, (baseline, candidate), strict=True)
        for rank in alignment.ranks
    }
    nodes = [
        make_node(comparison, coordinates[comparison.pair.rank], places[_recorded_by(comparison)])
        for comparison in comparisons
    ]
    names = _shared_names(baseline, candidate, alignment)
    graph = Graph(nodes, coordinates, names, alignment.forced, alignment.stand_ins, gathers_late=late)
    gains = context.gains if context is not None else Gains(baseline, candidate, alignment.pairs)
    own = OwnFaults(graph, baseline, candidate, gains)
    origins = find_origins(graph, own)
    return Facts(
        baseline=baseline,
        candidate=candidate,
        alignment=alignment,
        policy=policy,
        graph=graph,
        origins=origins,
        notes=tuple(filter(None, (*notes, own.note(origins)))),
        recorded=dict(zip(Side, recorded, strict=True)) if recorded else {},
        places=places,
    )


def _recorded_by(comparison: Comparison) -> tuple[Side, int]:
    """Return the side and the rank whose record says when it was: the baseline, where that has it."""
    pair = comparison.pair
    return (pair.side if isinstance(pair, Unmatched) else Side.BASELINE), pair.rank


def _missing_gradients(baseline: Run, candidate: Run, alignment: Alignment) -> list[Comparison]:
    """Turn gradients that one run alone has into comparisons: what is not trained is a divergence.

    Only where the other run recorded gradients of that kind of other parameters, and nothing that would show
    that it trains this one: else they were merely not captured.
    """
    others = {Side.BASELINE: candidate, Side.CANDIDATE: baseline}
    trained = {side: trained_names(run, alignment.ranks) for side, run in others.items()}
    names = {p.fqn for run in others.values() for rank in alignment.ranks for p in run.ranks[rank].parameters}
    kinds = {(pair.key.phase, pair.key.role) for pair in alignment.pairs}
    return [
        Comparison(pair=u, verdict=Verdict.MISSING, metrics={}, reason=f"only the {u.side.value} has it")
        for u in alignment.unmatched
        if (u.key.phase, u.key.role) in kinds and _is_gradient(u, names - trained[u.side])
    ]


def _is_gradient(unmatched: Unmatched, parameters: set[str]) -> bool:
    key = unmatched.key
    accumulated = key.phase is Phase.ACCUMULATE and key.slot == "after"
    return (key.role in _GRADIENTS or accumulated) and bool({key.fqn, f"{key.fqn}.weight"} & parameters)


def _shared_names(baseline: Run, candidate: Run, alignment: Alignment) -> dict[str, frozenset[str]]:
    """Return every declared parameter with the names of all that share its storage."""
    groups: dict[str, set[str]] = {}
    for run in (baseline, candidate):
        for rank in alignment.ranks:
            for parameter in run.ranks[rank].parameters:
                first = parameter.tied_to or parameter.fqn
                groups.setdefault(first, {first}).add(parameter.fqn)
    return {name: frozenset(group) for group in groups.values() for name in group}


def conclude(facts: Facts, findings: Sequence[Finding]) -> Diagnosis:
    """Give the verdict on two runs.

    Args:
        facts: the comparisons and origins.
        findings: of the rules, after replay.
    """
    comparisons = tuple(node.comparison for node in facts.graph.all.nodes)
    stand_ins = facts.alignment.stand_ins
    decided: Counter[Verdict] = Counter()
    for comparison in comparisons:
        decided[comparison.verdict] += stand_ins.weight(comparison.pair.rank, comparison.key)
    scalars = step_scalars(facts)
    findings = [*findings, *reported_findings(facts)]
    return Diagnosis(
        status=_status(facts, comparisons, findings, scalars),
        baseline=str(facts.baseline.path),
        candidate=str(facts.candidate.path),
        origins=facts.origins,
        findings=tuple(sorted(findings, key=_rank)),
        coverage=coverage_of(facts),
        scalars=scalars,
        steps=facts.alignment.steps,
        diverged=facts.graph.weigh(facts.graph.divergent.nodes),
        notes=(
            *_run_notes(facts),
            *facts.alignment.notes,
            *facts.notes,
            *_comparison_notes(comparisons),
            *_policy_notes(facts.policy, scalars),
        ),
        unmatched=facts.alignment.unmatched,
        policy=facts.policy.describe(),
        decided=decided,
        acceptance=accept(comparisons, scalars, stand_ins=stand_ins),
        comparisons=comparisons,
    )


def find_causes(facts: Facts) -> list[Finding]:
    """Apply every rule to the facts."""
    return run_rules(facts)


def _rank(finding: Finding) -> tuple[bool, int, bool, float]:
    """Order findings: proved first, then by severity and confidence; behind them a fault beside another."""
    beside = finding.id.endswith(".own_fault")  # by definition something that it consumed diverges before it
    return (
        not finding.proved_by_replay,
        list(Severity).index(finding.severity),
        beside,
        -finding.confidence,
    )


def _status(
    facts: Facts,
    comparisons: Sequence[Comparison],
    findings: Iterable[Finding],
    scalars: Sequence[StepScalars],
) -> Verdict:
    """Return the worst that is known; what was not exercised or not judged is never called aligned."""
    limit, error = facts.policy.max_mean_relative_loss_error, loss_error(scalars)
    if facts.origins or (limit is not None and error is not None and not error <= limit):
        return Verdict.DIVERGED
    ids = {finding.id for finding in findings}
    if any(id_.startswith("vacuous.") for id_ in ids) or ids & {
        "coverage.unmatched_records",
        "coverage.ranks_missing",
        "coverage.not_judged",
        "coverage.ranks_not_linked",
        "optimizer.parameters_unmoved",
    }:
        return Verdict.MISSING
    tolerated = any(c.verdict is Verdict.WITHIN_TOLERANCE or c.excused for c in comparisons)
    return Verdict.WITHIN_TOLERANCE if tolerated else Verdict.IDENTICAL


def _run_notes(facts: Facts) -> list[str]:
    sides = ((Side.BASELINE, facts.baseline), (Side.CANDIDATE, facts.candidate))
    return [f"{side.value}: {note}" for side, run in sides for note in run.notes]


def _comparison_notes(comparisons: Sequence[Comparison]) -> list[str]:
    """Name what was excused, and what was judged by little."""
    noise = [c for c in comparisons if c.metrics.get("noise_elements") and c.key.role in GRADIENT_ROLES]
    notes = []
    if noise:
        names = listed(c.key.fqn for c in noise)
        notes.append(f"{CANCELS}, so that no digit of them can agree: gradients of {names}")
    excused = [c for c in comparisons if c.excused]
    for by, rerouted in ((" by convention", False), ("", True)):
        apart = [c for c in excused if (REROUTED in c.metrics) is rerouted]
        if apart:
            first = f"first {apart[0].key.fqn}: {apart[0].reason}"
            notes.append(f"{count(len(apart), 'pair')} incomparable{by}, {first}")
    unseen = [c for c in comparisons if order_unseen(c)]
    if unseen:
        differing = all(isinstance(c.pair, Pair) and c.pair.bits_known for c in unseen)
        what = f"that {agree(len(unseen), 'differ')}" if differing else "of which no bits are known"
        who = f"{count(len(unseen), 'record')} {what} {agree(len(unseen), 'were')}"
        notes.append(
            f"{who} judged by norm, minimum and maximum alone, which a permutation does not change (first "
            f"{unseen[0].key.describe()}): {_seen_by(unseen, 'sketch or tensor')}"
        )
    blind = [c for c in comparisons if direction_unseen(c)]
    if blind:
        level = "tensor" if any("sketch_low" in c.metrics for c in blind) else "sketch or tensor"
        notes.append(
            f"judged after an update by the norm alone, which hardly shows a wrong direction: "
            f"{listed(c.key.fqn for c in blind)}: {_seen_by(blind, level)}"
        )
    return notes


def _seen_by(comparisons: Iterable[Comparison], level: str) -> str:
    """Say how both runs would have to be recorded."""
    pairs = (c.pair for c in comparisons if isinstance(c.pair, Pair))
    if any(record.summary is not None for pair in pairs for record in (pair.baseline, pair.candidate)):
        return "dump with msprobe's task tensor"
    return f"record both runs with capture.level={level}"


def _policy_notes(policy: Policy, scalars: Sequence[StepScalars]) -> list[str]:
    """Say what the run-wide bound of the policy decided."""
    if policy.max_mean_relative_loss_error is None:
        return []
    error = loss_error(scalars)
    bound = (
        f"policy {policy.name} allows a mean relative loss error of {policy.max_mean_relative_loss_error:g}"
    )
    if error is None or math.isnan(error):
        return [f"{bound}, but no loss was recorded in both runs: not judged"]
    return [f"{bound}; it is {error:.3g}"]
