"""Rules about dW: the layout of the operands, a factor, a kernel, accumulation and reduction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from mindspeed_precision.diagnose.facts import (
    Facts,
    Scale,
    concerns,
    describe_factor,
    describe_layout,
    names,
    pair_of,
    reason,
    same_layout,
    scale_of,
)
from mindspeed_precision.diagnose.moved import of_side
from mindspeed_precision.diagnose.replay_accumulate import accumulated
from mindspeed_precision.diagnose.rules.layouts import misread_sums
from mindspeed_precision.diagnose.rules.registry import rule
from mindspeed_precision.diagnose.rules.unseen_wgrad import dw_unseen
from mindspeed_precision.records import (
    Finding,
    Layout,
    Origin,
    Pair,
    Phase,
    RecordKey,
    Role,
    Severity,
    Side,
)

CONTIGUOUS_REMEDY = "wgrad_contiguous_operands"
"""Name of the remedy (``patches/remedies.yaml``) that computes dW from ``grad_output.t().contiguous()``."""


def _wgrad_origins(facts: Facts) -> list[Origin]:
    return facts.origins_in(Phase.WGRAD, Role.WGRAD, Role.BGRAD)


@rule("wgrad.scaled", "reduce.scaled")
def scaled(facts: Facts) -> Iterable[Finding]:
    """Find gradients that are a multiple of the baseline's although what they were computed from agrees."""
    for phase, origins in (
        ("wgrad", _wgrad_origins(facts)),
        ("reduce", facts.origins_in(Phase.REDUCE, Role.REDUCED_GRAD)),
    ):
        groups: dict[str, list[tuple[Origin, Scale]]] = defaultdict(list)
        for origin in origins:
            scale = scale_of(origin.comparison)
            if scale is not None:
                groups[f"{scale.factor:.3g}"].append((origin, scale))
        for members in groups.values():
            yield _scaled_finding(facts, f"{phase}.scaled", members)


def _scaled_finding(facts: Facts, id_: str, members: list[tuple[Origin, Scale]]) -> Finding:
    first, scale = members[0]
    what = "dW" if id_.startswith("wgrad") else "the reduced gradient"
    known = f"{'measured on' if scale.measured else 'from'} {scale.source}"
    return Finding(
        id=id_,
        severity=Severity.ERROR,
        confidence=0.95 if scale.measured else 0.7,
        title=f"{what} of {first.key.fqn} is {scale.factor:.6g} times the baseline's",
        evidence=(
            f"candidate = {describe_factor(facts, scale.factor)} × baseline, the rest is rounding ({known})",
            first.inputs,
            *concerns([origin for origin, _ in members]),
        ),
        remedy="candidate: look for a factor on this gradient: loss scale, 1 / number of "
        "microbatches, 1 / size of a group",
        where=first.key,
        explains=tuple(origin.key for origin, _ in members),
    )


@rule("wgrad.after_gemm")
def after_gemm(facts: Facts) -> Iterable[Finding]:
    """Find dW that reach the parameter otherwise than the GEMM, which agrees, made them."""
    origins = [o for o in _wgrad_origins(facts) if facts.product(o) and scale_of(o.comparison) is None]
    if origins:
        first = origins[0]
        yield Finding(
            id="wgrad.after_gemm",
            severity=Severity.ERROR,
            confidence=0.8,
            title=f"dW of {first.key.fqn} is changed between the GEMM, which gives the same in both "
            "runs, and the parameter",
            evidence=(first.inputs, *_zero(first), *concerns(origins)),
            remedy="look at what the backward of that linear does with grad_weight before it returns it",
            where=first.key,
            explains=tuple(origin.key for origin in origins),
        )


@rule("wgrad.operand_layout", "wgrad.value")
def operands(facts: Facts) -> Iterable[Finding]:
    """Tell dW that differ because the GEMM saw its operands in another layout from those that do not."""
    groups: dict[bool | None, list[Origin]] = defaultdict(list)
    for origin in _wgrad_origins(facts):
        if scale_of(origin.comparison) is None and not facts.product(origin):
            groups[_layouts_agree(facts, origin)].append(origin)
    if groups[False]:
        yield _operand_layout(facts, groups[False])
    if groups[None]:
        yield _value(
            facts,
            groups[None],
            confidence=0.4,
            layouts="the operands' layouts were not recorded: one may differ",
        )
    if groups[True]:
        yield _value(
            facts, groups[True], confidence=0.7, layouts="the operands lay in memory in the same way"
        )


def _layouts_agree(facts: Facts, origin: Origin) -> bool | None:
    """Tell whether all operands have one layout on both sides; None where that is not known."""
    answers = [same_layout(pair.baseline.layout, pair.candidate.layout) for pair in facts.operands(origin)]
    if False in answers:
        return False
    return True if answers and None not in answers else None


def _operand_layout(facts: Facts, origins: list[Origin]) -> Finding:
    first = origins[0]
    differing = [
        pair
        for pair in facts.operands(first)
        if same_layout(pair.baseline.layout, pair.candidate.layout) is False
    ]
    evidence = [first.inputs]
    for pair in differing:
        one, two = pair.baseline.layout, pair.candidate.layout
        assert one is not None
        assert two is not None
        evidence.append(
            f"{pair.key.role.value} {list(pair.baseline.shape)}: {describe_layout(one)} in the baseline, "
            f"{describe_layout(two)} in the candidate"
        )
    evidence += concerns(origins)
    return Finding(
        id="wgrad.operand_layout",
        severity=Severity.ERROR,
        confidence=0.9,
        title="layout of a GEMM operand: the same numbers lie in memory in another order, so the "
        "kernel adds them "
        "in another order",
        evidence=tuple(evidence),
        remedy=_layout_remedy(differing),
        where=first.key,
        explains=tuple(origin.key for origin in origins),
    )


def _layout_remedy(differing: list[Pair]) -> str:
    """Return the setting that gives one side the other's layout, where there is one."""
    for pair in differing:
        if pair.key.role is not Role.GRAD_OUTPUT:
            continue
        for side, other, mine in (
            (Side.CANDIDATE, pair.baseline.layout, pair.candidate.layout),
            (Side.BASELINE, pair.candidate.layout, pair.baseline.layout),
        ):
            if _transposed(other) and not _transposed(mine):
                return f"{side.value}: --precision-debug-set remedies=[{CONTIGUOUS_REMEDY}]"
    return "make both runs hand the operand over in the same layout (.contiguous() at the same place)"


def _transposed(layout: Layout | None) -> bool:
    """Tell whether a matrix is seen through the transpose of a contiguous one."""
    return layout is not None and not layout.contiguous and len(layout.stride) == 2 and layout.stride[0] == 1


def _value(facts: Facts, origins: list[Origin], *, confidence: float, layouts: str) -> Finding:
    first = origins[0]
    what = "the gradient of the bias" if first.key.role is Role.BGRAD else "dW"
    return Finding(
        id="wgrad.value",
        severity=Severity.ERROR,
        confidence=confidence,
        title=f"{what} of {first.key.fqn} is computed differently from the same operands",
        evidence=(first.inputs, layouts, *_zero(first), *concerns(origins)),
        remedy="compare the kernels, their accumulation type and the determinism settings of both runs",
        where=first.key,
        explains=tuple(origin.key for origin in origins),
    )


def _zero(origin: Origin) -> tuple[str, ...]:
    """Say so where every element of one side is zero."""
    pair = pair_of(origin.comparison)
    numbers = {side: of_side(pair, side).digest.statistics for side in Side}
    zero = [side.value for side, found in numbers.items() if found and found.zeros == pair.candidate.numel]
    return (f"every element is zero in the {zero[0]}",) if len(zero) == 1 else ()


@rule("wgrad.operand_value")
def operand_value(facts: Facts) -> Iterable[Finding]:
    """Find operands that differ although what the module received does not."""
    origins = facts.origins_in(Phase.WGRAD, Role.GRAD_OUTPUT, Role.INPUT)
    if origins:
        first = origins[0]
        yield Finding(
            id="wgrad.operand_value",
            severity=Severity.ERROR,
            confidence=0.7,
            title=f"the {first.key.role.value} that the wgrad GEMM of {first.key.fqn} saw is not "
            "what the module received",
            evidence=(first.inputs, *_reordered(first), *concerns(origins)),
            remedy="look at what happens between the module's boundary and its GEMM: gather, "
            "cast, saved activations",
            where=first.key,
            explains=tuple(origin.key for origin in origins),
        )


def _reordered(origin: Origin) -> tuple[str, ...]:
    pair = origin.comparison.pair
    if not isinstance(pair, Pair):
        return ()
    one, two = pair.baseline.digest, pair.candidate.digest
    same = one.exact and two.exact and one.unordered == two.unordered
    return (
        ("both hold the same elements, in another order: the sum over them rounds otherwise",) if same else ()
    )


@rule("wgrad.accumulation", "wgrad.stale_main_grad")
def accumulation(facts: Facts) -> Iterable[Finding]:
    """Find gradient accumulators that start from, or add, something else; ``layouts`` has those misread."""
    misread = {origin.key for origin in misread_sums(facts)}
    origins = facts.origins_in(Phase.ACCUMULATE, Role.MAIN_GRAD)
    origins = [o for o in origins if o.key.slot == "before" or not dw_unseen(facts, o)]
    stale = [origin.key for origin in origins if origin.key.slot == "before"]
    if stale:
        yield _accumulation_finding(
            facts,
            stale,
            id_="wgrad.stale_main_grad",
            title="does not start a microbatch from what the one before left",
            remedy="look at who clears or writes the gradient buffer between steps and microbatches",
        )
    other = [origin.key for origin in origins if origin.key.slot == "after" and origin.key not in misread]
    if other:
        yield another_sum(facts, other)


def another_sum(facts: Facts, keys: Iterable[RecordKey]) -> Finding:
    """Report accumulations that give another sum from equal operands."""
    return _accumulation_finding(
        facts,
        list(keys),
        id_="wgrad.accumulation",
        title="gets another sum from the same dW",
        remedy="compare the dtype of the gradient buffer and how dW is added (fusion, "
        "accumulate_allreduce_grads_in_fp32)",
    )


def _accumulation_finding(
    facts: Facts, keys: Collection[RecordKey], *, id_: str, title: str, remedy: str
) -> Finding:
    members = [origin for origin in facts.origins if origin.key in keys]
    first = members[0]
    return Finding(
        id=id_,
        severity=Severity.ERROR,
        confidence=0.8,
        title=f"main_grad of {first.key.fqn} {title}",
        evidence=(first.inputs, *reason(first), *_unchanged(facts, first), *concerns(members)),
        remedy=remedy,
        where=first.key,
        explains=tuple(origin.key for origin in members),
    )


def _unchanged(facts: Facts, origin: Origin) -> tuple[str, ...]:
    """Say where an accumulation left main_grad as it was although dW is not zero."""
    operands = accumulated(facts, facts.node_of(origin))
    if not {"main_grad", "dW"} <= set(operands):
        return ()
    result, lines = pair_of(origin.comparison), []
    for side in Side:
        before, after, wgrad = (of_side(p, side) for p in (operands["main_grad"], result, operands["dW"]))
        statistics = wgrad.digest.statistics
        if before.digest.same_bits(after.digest) and statistics and statistics.l2_norm:
            lines.append(
                f"in the {side.value} main_grad is the same after dW was added as before: the "
                "addition, in place, had no effect"
            )
    return tuple(lines)


@rule("reduce.value")
def reduction(facts: Facts) -> Iterable[Finding]:
    """Find gradients that differ after reduction although no rank's contribution does."""
    origins = [o for o in facts.origins_in(Phase.REDUCE, Role.REDUCED_GRAD) if scale_of(o.comparison) is None]
    if origins:
        first = origins[0]
        yield Finding(
            id="reduce.value",
            severity=Severity.ERROR,
            confidence=0.75,
            title=f"the reduction of the gradient of {first.key.fqn} gives another result from the "
            "same contributions",
            evidence=(
                first.inputs,
                f"ranks {names(map(str, first.ranks), most=8)}",
                *concerns(origins),
            ),
            remedy="compare the collective's group, operation, dtype and algorithm (NCCL_ALGO, "
            "HCCL_DETERMINISTIC)",
            where=first.key,
            explains=tuple(origin.key for origin in origins),
        )


@rule("model.frozen_parameter")
def frozen(facts: Facts) -> Iterable[Finding]:
    """Find parameters that one run trains and the other does not."""
    for side in Side:
        members = [name for name, trained in facts.trained_on_one_side.items() if trained is side]
        if not members:
            continue
        other = Side.CANDIDATE if side is Side.BASELINE else Side.BASELINE
        explained = [o.key for o in facts.origins if facts.parameter_of(o.key) in members]
        declared = [name for name in members if other in facts.declarations.get(name, {})]
        untrained = [name for name in declared if not facts.declarations[name][other].trainable]
        yield Finding(
            id="model.frozen_parameter",
            severity=Severity.ERROR,
            confidence=0.97 if untrained else 0.85,
            title=f"{names(members)} {'is' if len(members) == 1 else 'are'} trained in the {side.value} only",
            evidence=(
                f"requires_grad is False in the {other.value}"
                if untrained
                else f"the {other.value} declares it trainable, but no dW arrived",
                f"dW recorded in the {side.value}, none in the {other.value}",
            ),
            remedy=f"{other.value}: set requires_grad on {names(members)}, and put it into an "
            "optimizer group",
            where=next(iter(explained), None),
            explains=tuple(explained),
        )
