"""Operations that only move numbers (split, concatenate, transpose), known by what enters and leaves them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from mindspeed_precision.diagnose.facts import Facts, names, pair_of, tolerated
from mindspeed_precision.diagnose.graph import Node
from mindspeed_precision.record.fingerprint import MASK64
from mindspeed_precision.records import Origin, Pair, Phase, Role, Side, TensorRecord

MOST_PARTS = 4
"""Most tensors that are tried as what entered one operation."""

_NEAREST = 16
"""Earlier gradients that are tried: those of the modules beside the one that the result reaches."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """What entered and what left the operation before a gradient.

    Attributes:
        result: the gradient that left it.
        parts: the gradients that entered it, by a short name (``core_attention[2]``), in execution order.
    """

    result: Pair
    parts: Mapping[str, Pair]

    @property
    def names(self) -> str:
        """Name the parts."""
        return names(self.parts)

    def only_moves(self, side: Side) -> bool:
        """Tell whether the result is made of exactly the elements that entered, in whatever order.

        Unordered fingerprints of disjoint parts add up (``record.fingerprint``), so no element is needed.
        """
        entered = [of_side(pair, side).digest for pair in self.parts.values()]
        result = of_side(self.result, side).digest
        known = all(digest.exact for digest in (*entered, result))
        return known and sum(digest.unordered for digest in entered) & MASK64 == result.unordered


def of_side(pair: Pair, side: Side) -> TensorRecord:
    """Return the record of one side."""
    return pair.baseline if side is Side.BASELINE else pair.candidate


def move_of(facts: Facts, origin: Origin) -> Move | None:
    """Find what entered the operation whose result is the gradient of an origin.

    Candidates are the gradients seen before it at the modules beside its own, all of which agree: those whose
    elements are together exactly the result's on a side, the latest first; else all that the last module sent
    back, where it has as many elements as the result.
    """
    node, result = facts.node_of(origin), pair_of(origin.comparison)
    earlier = [other for other in facts.nodes.values() if _precedes(other, node, result)]
    earlier.sort(key=lambda other: other.seq, reverse=True)
    moves = (_move(result, members) for members in _choices(earlier[:_NEAREST], result.candidate.numel))
    found = next((move for move in moves if any(move.only_moves(side) for side in Side)), None)
    return found or next(_sent_back(earlier, result), None)


def _precedes(other: Node, node: Node, result: Pair) -> bool:
    key, pair = other.key, other.comparison.pair
    return (
        key.phase is Phase.DGRAD
        and key.role in (Role.GRAD_INPUT, Role.GRAD_OUTPUT)
        and (key.step, key.microbatch, key.recomputed) == (node.key.step, node.key.microbatch, False)
        and key.fqn.rpartition(".")[0] == node.key.fqn.rpartition(".")[0]
        and other.rank == node.rank
        and other.seq < node.seq
        and isinstance(pair, Pair)
        and pair.candidate.dtype == result.candidate.dtype
        and tolerated(other.comparison.verdict)
    )


def _choices(earlier: Sequence[Node], elements: int) -> Iterator[tuple[Node, ...]]:
    """Yield the sets of records that have as many elements as the result, few and late ones first."""
    for count in range(1, MOST_PARTS + 1):
        for members in combinations(earlier, count):
            if sum(pair_of(member.comparison).candidate.numel for member in members) == elements:
                yield members


def _sent_back(earlier: Sequence[Node], result: Pair) -> Iterator[Move]:
    """Yield what each module sent back, the last one first, where it has as many elements as the result."""
    sent = [node for node in earlier if node.key.role is Role.GRAD_INPUT]
    for call in dict.fromkeys((node.key.fqn, node.key.occurrence) for node in sent):
        members = [node for node in sent if (node.key.fqn, node.key.occurrence) == call]
        if sum(pair_of(node.comparison).candidate.numel for node in members) == result.candidate.numel:
            yield _move(result, members)


def _move(result: Pair, members: Sequence[Node]) -> Move:
    ordered = sorted(members, key=lambda node: node.seq)
    return Move(result=result, parts={_name(node): pair_of(node.comparison) for node in ordered})


def _name(node: Node) -> str:
    key = node.key
    call = f" call {key.occurrence}" if key.occurrence else ""
    role = "" if key.role is Role.GRAD_INPUT else f" {key.role.value}"
    return f"{key.fqn.rpartition('.')[2]}[{key.slot}]{role}{call}"
