"""Rules about what was not looked at: gaps, and answers that would be empty."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from mindspeed_precision.align.compatible import other_tool
from mindspeed_precision.align.shards import CanonicalRank
from mindspeed_precision.config import CaptureRule, capture_rules
from mindspeed_precision.counting import count
from mindspeed_precision.diagnose.coverage import gaps
from mindspeed_precision.diagnose.facts import Facts, names
from mindspeed_precision.diagnose.rules.registry import rule
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.records import (
    Finding,
    Pair,
    Phase,
    RecordKey,
    Role,
    Severity,
    Side,
    Unmatched,
    Verdict,
)
from mindspeed_precision.repeats import first_runs_of

_GRADIENTS = {Role.WGRAD, Role.BGRAD, Role.MAIN_GRAD, Role.REDUCED_GRAD}


@rule("coverage.parameter_without_wgrad")
def parameters_without_wgrad(facts: Facts) -> Iterable[Finding]:
    """Name the trainable parameters whose dW was not seen in every microbatch of both runs."""
    missing = [gap for gap in gaps(facts) if gap.fqn not in facts.trained_on_one_side]
    if missing:
        first = missing[0]
        yield Finding(
            id="coverage.parameter_without_wgrad",
            severity=Severity.WARNING,
            confidence=1.0,
            title=f"dW was not seen in every microbatch for {len(missing)} of "
            f"{count(len(facts.declarations), 'parameter')}",
            evidence=(
                names((gap.fqn for gap in missing), most=8),
                f"first: {first.fqn}, rank {first.rank}, step {first.step}, microbatch {first.microbatch}, "
                f"in the {first.side.value}",
            ),
            remedy="look at `patches check` and at the settings capture.wgrad and capture.rules of that run",
        )


@rule("coverage.unmatched_records")
def unmatched(facts: Facts) -> Iterable[Finding]:
    """Report records without a partner, grouped by what they are."""
    alone = [u for u in facts.alignment.unmatched if not _about_frozen(facts, u)]
    if not alone:
        return
    stand_ins = facts.alignment.stand_ins
    kinds: Counter[str] = Counter()
    for u in alone:
        kind = f"{u.key.phase.value}/{u.key.role.value} in the {u.side.value} only"
        kinds[kind] += stand_ins.weight(u.rank, u.key)
    first, total = alone[0], kinds.total()
    closest = f"; closest: {first.closest[0].describe()}" if first.closest else ""
    yield Finding(
        id="coverage.unmatched_records",
        severity=Severity.WARNING,
        confidence=1.0,
        title=f"{count(total, 'record')} without a partner: not compared",
        evidence=(
            *(f"{number} × {kind}" for kind, number in kinds.most_common(5)),
            f"first: {first.key.describe()}{closest}",
        ),
        remedy="record both runs with the same settings of capture, and the same modules",
        where=first.key,
    )


@rule("coverage.ranks_missing")
def ranks_missing(facts: Facts) -> Iterable[Finding]:
    """Report ranks that were to record and have no records: a directory that was lost, or not copied."""
    told = [f"{side.value}: {run.missing.text}" for side, run in facts.whole.items() if run.missing]
    if told:
        yield Finding(
            id="coverage.ranks_missing",
            severity=Severity.WARNING,
            confidence=1.0,
            title="ranks that were to record have no records: not compared",
            evidence=tuple(told),
            remedy="bring the directories of these ranks; record some ranks alone with the setting `ranks`",
        )


def _about_frozen(facts: Facts, unmatched: Unmatched) -> bool:
    name = unmatched.key.fqn
    return any(name in (parameter, parameter.rpartition(".")[0]) for parameter in facts.trained_on_one_side)


@rule("coverage.rule_without_match")
def rules_without_match(facts: Facts) -> Iterable[Finding]:
    """Name the rules of capture that no record of their run fits: what they were to keep was not kept."""
    lines = []
    for side, run in ((Side.BASELINE, facts.baseline), (Side.CANDIDATE, facts.candidate)):
        if first_runs_of(run.manifest):
            continue  # its rules name the records of both sides; `not_repeated` says what is missing
        settings = run.manifest.get("settings")
        named = [rule for rule in capture_rules(settings) if rule.level is not None and rule.fqn != "*"]
        unmatched = [rule for rule in named if not any(rule.applies(key) for key in _keys(run, rule))]
        if facts.recorded:  # a rank that is named may be one for which another stands
            of_ranks = {rule for rule in unmatched if rule.ranks.text}
            whole = facts.recorded[side]
            found = {rule for rule in of_ranks if any(rule.applies(key) for key in _keys(whole, rule))}
            unmatched = [rule for rule in unmatched if rule not in found]
        lines += [f"in the {side.value}: {rule.describe()}" for rule in unmatched]
    if lines:
        yield Finding(
            id="coverage.rule_without_match",
            severity=Severity.WARNING,
            confidence=1.0,
            title=f"{count(len(lines), 'rule')} of capture.rules matched no record",
            evidence=tuple(lines),
            remedy="look at the names with `mindspeed-precision show RUN`",
        )


def _keys(run: Run, rule: CaptureRule) -> Iterable[RecordKey]:
    first = next(iter(run.ranks.values()))
    ranks = first.run.ranks if isinstance(first, CanonicalRank) else run.ranks  # a lane is no rank
    return (record.key for rank, held in ranks.items() if rank in rule.ranks for record in held.records)


@rule("coverage.not_judged")
def not_judged(facts: Facts) -> Iterable[Finding]:
    """Report pairs that are not known to be equal and of which the policy needs more than was recorded."""
    nodes = [
        node
        for node in facts.graph.all.nodes
        if node.comparison.verdict is Verdict.MISSING and isinstance(node.comparison.pair, Pair)
    ]
    if nodes:
        first = min(nodes, key=lambda node: node.order)
        known = all(node.comparison.pair.bits_known for node in nodes)  # type: ignore[union-attr]
        whose = "whose bits differ" if known else "whose bits are not known"
        tool = other_tool(facts.baseline, facts.candidate)
        yield Finding(
            id="coverage.not_judged",
            severity=Severity.WARNING,
            confidence=1.0,
            title=f"{count(facts.graph.weigh(nodes), 'pair')} {whose} could not be judged by the policy "
            f"{facts.policy.name}",
            evidence=(f"first: {first.key.describe()}", first.comparison.reason),
            remedy="dump both alike: msprobe's task tensor, or statistics with one summary_mode"
            if tool
            else "record both runs at a level that the policy can judge (--precision-debug-set "
            "capture.level=sketch, or tensor), or use another policy",
            where=first.key,
        )


@rule("vacuous.no_records", "vacuous.no_gradient", "vacuous.lr_zero")
def vacuous(facts: Facts) -> Iterable[Finding]:
    """Refuse to certify agreement of what the runs did not exercise."""
    nodes = [node for node in facts.graph.all.nodes if node.key.step >= 0]
    if not nodes:
        nothing = "no record of a training step was compared"
        if not other_tool(facts.baseline, facts.candidate):
            yield _vacuous("vacuous.no_records", nothing, "record at least one step")
        else:
            yield _vacuous(
                "vacuous.no_records",
                f"{nothing}: the dump and the run share no module (a dump of level L1 has operations alone)",
                "dump again with level L0 or mix (config.json), or dump both sides with msprobe",
            )
        return
    gradients = [node for node in nodes if node.key.role in _GRADIENTS]
    if other_tool(facts.baseline, facts.candidate):  # a dump of operations has those that flow back alone
        gradients += [node for node in nodes if node.key.phase is Phase.DGRAD]
    if not gradients:
        yield _vacuous(
            "vacuous.no_gradient",
            "no gradient was compared: the backward pass is unseen",
            "set capture.wgrad=true",
        )
    elif all(_zero(node.comparison.pair) for node in gradients):
        yield _vacuous(
            "vacuous.no_gradient",
            "every compared gradient is zero",
            "look at the loss, its mask and requires_grad",
        )
    rates = [node for node in nodes if node.key.phase is Phase.OPTIMIZER and node.key.slot == "lr"]
    if rates and all(_value_zero(node.comparison.pair) for node in rates):
        yield _vacuous(
            "vacuous.lr_zero",
            "the learning rate is zero in every compared step: no update was exercised",
            "compare a step after the warm-up begins, or set a learning rate",
        )


@rule("vacuous.no_update")
def no_update(facts: Facts) -> Iterable[Finding]:
    """Refuse to certify an optimizer that was called and never updated anything."""
    seen = {node.key.role for node in facts.graph.all.nodes if node.key.phase is Phase.OPTIMIZER}
    if other_tool(facts.baseline, facts.candidate):
        return  # its dump never shows the optimizer, and says so
    if Role.PARAM in seen and Role.HYPERPARAMETER not in seen:
        yield _vacuous(
            "vacuous.no_update",
            "no update of the optimizer was seen in any compared step",
            "compare steps that fp16 does not skip for overflow (a smaller --initial-loss-scale); "
            "of an optimizer that is none of torch.optim's no update can be seen",
        )


def _vacuous(id_: str, title: str, remedy: str) -> Finding:
    return Finding(
        id=id_,
        severity=Severity.WARNING,
        confidence=1.0,
        title=title,
        evidence=("agreement here would prove nothing",),
        remedy=remedy,
    )


def _zero(pair: Pair | Unmatched) -> bool:
    records = (pair.baseline, pair.candidate) if isinstance(pair, Pair) else (pair.record,)
    found = [(record.digest.statistics, record.numel) for record in records]
    return all(statistics is not None and statistics.zeros == numel for statistics, numel in found)


def _value_zero(pair: Pair | Unmatched) -> bool:
    return isinstance(pair, Pair) and pair.baseline.value == 0 and pair.candidate.value == 0
