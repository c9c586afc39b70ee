"""Operations that only move numbers (split, concatenate, transpose), known by what enters and leaves them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed_precision.diagnose.facts import Facts, pair_of, tolerated
from mindspeed_precision.diagnose.graph import Node
from mindspeed_precision.record.fingerprint import MASK64
from mindspeed_precision.records import Origin, Pair, Phase, Role, Side, TensorRecord


@dataclass(frozen=True, kw_only=True)
class Move:
    """What entered and what left the operation before a gradient.

    Attributes:
        result: the gradient that left it.
        parts: the gradients that entered it, by slot: all that one module sent back.
        module: that module.
    """

    result: Pair
    parts: Mapping[str, Pair]
    module: str

    @property
    def names(self) -> str:
        """Name the parts."""
        return f"grad_input {', '.join(self.parts)} of {self.module}"

    def only_moves(self, side: Side) -> bool:
        """Tell whether the result is made of exactly the elements that entered, in whatever order.

        Unordered fingerprints of disjoint parts add up (``record.fingerprint``), so no element is needed.
        """
        entered = sum(of_side(pair, side).digest.unordered for pair in self.parts.values()) & MASK64
        return entered == of_side(self.result, side).digest.unordered


def of_side(pair: Pair, side: Side) -> TensorRecord:
    """Return the record of one side."""
    return pair.baseline if side is Side.BASELINE else pair.candidate


def move_of(facts: Facts, origin: Origin) -> Move | None:
    """Find what entered the operation whose result is the gradient of an origin.

    That is the last module before it, on its rank and in its microbatch, whose gradients agree and have as
    many elements, of the same type, as the result.
    """
    node, result = facts.node_of(origin), pair_of(origin.comparison)
    earlier = [other for other in facts.nodes.values() if _sends(other, node)]
    earlier.sort(key=lambda other: other.seq, reverse=True)
    for name in dict.fromkeys((other.key.fqn, other.key.occurrence) for other in earlier):
        members = sorted(
            (other for other in earlier if (other.key.fqn, other.key.occurrence) == name),
            key=lambda other: other.seq,
        )
        parts = {other.key.slot: pair_of(other.comparison) for other in members}
        same_type = {pair.candidate.dtype for pair in parts.values()} == {result.candidate.dtype}
        if same_type and sum(pair.candidate.numel for pair in parts.values()) == result.candidate.numel:
            return Move(result=result, parts=dict(sorted(parts.items())), module=name[0])
    return None


def _sends(other: Node, node: Node) -> bool:
    key = other.key
    return (
        key.phase is Phase.DGRAD
        and key.role is Role.GRAD_INPUT
        and (key.step, key.microbatch, key.recomputed) == (node.key.step, node.key.microbatch, False)
        and other.rank == node.rank
        and other.seq < node.seq
        and isinstance(other.comparison.pair, Pair)
        and tolerated(other.comparison.verdict)
    )
