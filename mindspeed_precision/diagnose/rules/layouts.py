"""Rules about operations that read a tensor's storage without regard to its strides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mindspeed_precision.diagnose.facts import Facts, concerns, describe_layout, names, reason
from mindspeed_precision.diagnose.graph import Node
from mindspeed_precision.diagnose.moved import Move, move_of, of_side
from mindspeed_precision.diagnose.replay_accumulate import accumulated
from mindspeed_precision.diagnose.rules.registry import rule
from mindspeed_precision.diagnose.storage import may_be_misread
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
    Verdict,
)

WRONG_SIDE = "the side that is wrong"
"""Who must act, until a replay tells."""

CONTIGUOUS_WGRAD = "wgrad_contiguous"
"""Name of the remedy (``patches/remedies.yaml``) that makes a linear return a contiguous dW."""

SPLIT_BY_SLICES = "split_by_slices"
"""Name of the remedy that splits by slices, whose backward reads strides."""


@rule("layout.noncontiguous_accumulate")
def accumulate(facts: Facts) -> Iterable[Finding]:
    """Find sums of gradients that differ although main_grad and dW agree, one of them not dense in memory."""
    sums = [(origin, _odd_operands(facts, facts.node_of(origin))) for origin in misread_sums(facts)]
    if not sums:
        return
    first, odd = sums[0]
    sides = [side for side in Side if odd[side]]
    one_side = len(sides) == 1
    where = f"the {sides[0].value}" if one_side else "both runs"
    yield Finding(
        id="layout.noncontiguous_accumulate",
        severity=Severity.ERROR,
        confidence=_accumulate_confidence(first, [odd[side] for side in sides]),
        title=f"main_grad of {first.key.fqn} gets another sum from the same dW: in {where} what is added "
        "does not lie densely in memory, and an addition that ignores strides reads other numbers",
        evidence=(
            first.inputs,
            *reason(first),
            *_layout_lines({side: odd[side] for side in sides}),
            *_reordered(first),
            *concerns([origin for origin, _ in sums]),
        ),
        remedy=_accumulate_remedy(sides),
        where=first.key,
        explains=tuple(origin.key for origin, _ in sums),
    )


@rule("layout.noncontiguous_accumulate")
def accumulate_unseen(facts: Facts) -> Iterable[Finding]:
    """Find sums that only statistics call equal, of an operand that may be misread, before a divergence.

    A misread gradient can hold the elements of the right one in another order: no norm tells them apart.
    """
    sums = unseen_sums(facts)
    keys = [origin.key for origin in facts.origins]
    updates = [key for key in keys if updates_unseen(key, sums)]
    later = [key for key in keys if sums and key.step > sums[0].key.step]
    if not updates and not later:
        return
    first = sums[0]
    odd = _odd_operands(facts, first)
    side = next(side for side in Side if odd[side])
    yield Finding(
        id="layout.noncontiguous_accumulate",
        severity=Severity.ERROR,
        confidence=0.8 if updates else 0.45,
        title=f"main_grad of {first.key.fqn} may be another sum: in the {side.value} what is added does not "
        "lie densely in memory, and an addition that ignores strides reads other numbers",
        evidence=(
            f"{first.key.describe()}: bits differ, statistics agree, which do not see the order of elements",
            *_layout_lines({side: odd[side]}),
            f"it concerns {names(node.key.fqn for node in sums)}",
        ),
        remedy=f"{_accumulate_remedy([side])}; to prove it, rerun both with --precision-debug-config "
        "refine.yaml and compare again",
        where=first.key,
        explains=tuple(dict.fromkeys([*updates, *later])),
    )


def unseen_sums(facts: Facts) -> list[Node]:
    """Return the accumulations, in execution order, that agree in statistics alone and may be misread."""
    found = [
        node
        for node in facts.graph.all.nodes
        if node.key.phase is Phase.ACCUMULATE
        and node.key.slot == "after"
        and node.comparison.verdict is Verdict.WITHIN_TOLERANCE
        and not {"mismatched", "sketch_high"} & set(node.comparison.metrics)  # both see the order
        and "main_grad" in accumulated(facts, node)
        and [_strided(odd) for odd in _odd_operands(facts, node).values()].count(True) == 1
    ]
    return sorted(found, key=lambda node: node.order)


def updates_unseen(key: RecordKey, sums: Sequence[Node]) -> bool:
    """Tell whether a record is of the update that one of these sums went into."""
    updated = {(node.key.step, node.key.fqn) for node in sums}
    phases = (Phase.REDUCE, Phase.CLIP, Phase.OPTIMIZER)
    return key.phase in phases and (key.step, key.fqn) in updated


def _accumulate_confidence(first: Origin, odd: list[dict[str, Layout]]) -> float:
    if first.comparison.metrics.get("permutation"):
        return 0.95
    return 0.85 if len(odd) == 1 and _strided(odd[0]) else 0.6


def _reordered(first: Origin) -> tuple[str, ...]:
    """Say that both sums hold the same elements: every operand was misread in the same way."""
    if not first.comparison.metrics.get("permutation"):
        return ()
    return ("both sums hold the same elements in another order: norm, minimum and maximum are equal",)


def _accumulate_remedy(sides: list[Side]) -> str:
    which = sides[0].value if len(sides) == 1 else WRONG_SIDE
    return (
        f"{which}: --precision-debug-set remedies=[{CONTIGUOUS_WGRAD}], or return grad_weight.contiguous() "
        "from the backward of that linear"
    )


def misread_sums(facts: Facts) -> list[Origin]:
    """Return the accumulations that diverge and of which an operand may have been misread."""
    found = []
    for origin in facts.origins_in(Phase.ACCUMULATE, Role.MAIN_GRAD):
        if origin.key.slot == "after":
            odd = _odd_operands(facts, facts.node_of(origin))
            strided = any(_strided(layouts) for layouts in odd.values())
            if strided or bool(odd[Side.BASELINE]) != bool(odd[Side.CANDIDATE]):
                found.append(origin)
    return found


def _odd_operands(facts: Facts, total: Node) -> Mapping[Side, dict[str, Layout]]:
    """Return by side the layouts of the operands, by name, that a careless addition misreads."""
    found: dict[Side, dict[str, Layout]] = {}
    for side in Side:
        layouts = {name: of_side(pair, side).layout for name, pair in accumulated(facts, total).items()}
        found[side] = {n: lay for n, lay in layouts.items() if lay is not None and may_be_misread(lay)}
    return found


def _layout_lines(odd: Mapping[Side, Mapping[str, Layout]]) -> list[str]:
    """Describe layouts by name, once where both runs have the same one."""
    runs: dict[str, list[Side]] = {}
    for side, layouts in odd.items():
        for name, layout in layouts.items():
            runs.setdefault(f"{name}: {describe_layout(layout)}", []).append(side)
    both = "both runs"
    return [
        f"{line} in {both if len(sides) == len(Side) else f'the {sides[0].value}'}"
        for line, sides in runs.items()
    ]


def _strided(layouts: Mapping[str, Layout]) -> bool:
    """Tell whether one is not contiguous; an offset alone is usual: a buffer holds many gradients."""
    return any(not layout.contiguous for layout in layouts.values())


@rule("layout.noncontiguous_grad")
def moved(facts: Facts) -> Iterable[Finding]:
    """Find gradients that a split, chunk or transpose sent on wrongly, from parts in unusual layouts."""
    found = []
    for origin in facts.origins_in(Phase.DGRAD, Role.GRAD_OUTPUT):
        move = move_of(facts, origin)
        if move is not None and _may_be_misplaced(move):
            found.append((origin, move))
    if found:
        yield _moved_finding(found)


def _may_be_misplaced(move: Move) -> bool:
    """Tell whether layouts can account for it: the side with other numbers had a part that may be misread."""
    odd = [side for side in Side if _odd_parts(move, side)]
    suspects = [side for side in Side if not move.only_moves(side)]
    if len(suspects) == 1:
        return suspects[0] in odd
    return len(odd) == 1 if suspects else bool(odd)


def _odd_parts(move: Move, side: Side) -> dict[str, Layout]:
    layouts = {slot: of_side(pair, side).layout for slot, pair in move.parts.items()}
    return {slot: layout for slot, layout in layouts.items() if layout is not None and may_be_misread(layout)}


def _moved_finding(found: list[tuple[Origin, Move]]) -> Finding:
    first, move = found[0]
    sides = [side for side in Side if _odd_parts(move, side)]
    moves = [side for side in Side if move.only_moves(side)]
    confidence = {2: 0.9, 1: 0.8, 0: 0.55}[len(moves)]
    return Finding(
        id="layout.noncontiguous_grad",
        severity=Severity.ERROR,
        confidence=confidence if len(sides) == 1 else min(confidence, 0.7),
        title=f"gradients that flow back ({move.names}) agree, what reaches {first.key.fqn} does not: "
        "the operation between them (the backward of a split or a chunk) moves numbers to wrong places",
        evidence=(
            _inputs(move),
            *reason(first),
            *_layout_lines({side: _odd_parts(move, side) for side in sides}),
            _conserved(moves, first.key),
            *concerns([origin for origin, _ in found]),
        ),
        remedy=_moved_remedy(sides),
        where=first.key,
        explains=tuple(origin.key for origin, _ in found),
    )


def _inputs(move: Move) -> str:
    same = all(_same_bits(pair) for pair in move.parts.values())
    return f"{move.names} {'have the same bits on both sides' if same else 'differ within tolerance'}"


def _same_bits(pair: Pair) -> bool:
    return pair.baseline.digest.same_bits(pair.candidate.digest)


def _conserved(moves: list[Side], key: RecordKey) -> str:
    """Say on which sides the result holds just the elements that entered: unordered fingerprints add up."""
    what = f"{key.role.value} of {key.fqn} holds exactly the elements that entered"
    if len(moves) == len(Side):
        return f"on both sides {what}: they differ in their order alone"
    if moves:
        return f"in the {moves[0].value} {what}, in the other run other numbers"
    return f"on no side {what}: something between them computes, and the layout is a guess"


def _moved_remedy(sides: list[Side]) -> str:
    which = sides[0].value if len(sides) == 1 else WRONG_SIDE
    return (
        f"{which}: split with mint.chunk, ops.split or slices instead of mint.split, or "
        f"--precision-debug-set remedies=[{SPLIT_BY_SLICES}] (MindSpore on CPU: 2.8.0 to 2.10.0 are wrong, "
        "2.7.1 and 2.7.2 are right)"
    )
