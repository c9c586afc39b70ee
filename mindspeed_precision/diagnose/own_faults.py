"""Gradients that differ because their inputs do: which of them have a fault of their own as well.

One fault in a forward changes every gradient behind it, and so hides any other. But each run shows by itself
whether a gradient is what it was computed from: a dW that reaches its parameter is a copy of what the GEMM
gave, a GEMM's dW is the product of its operands, and the reduction multiplies by one number. Where one run
keeps such a law and the other breaks it, something else is wrong there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from statistics import median

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.compare.gain import Gains
from mindspeed_precision.diagnose.graph import Graph, Node
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.record.elements import to_numbers
from mindspeed_precision.records import Origin, Pair, Phase, Role, Side, TensorRecord, Verdict

_GRADIENTS = (Role.WGRAD, Role.BGRAD)
_OPERANDS = (Role.GRAD_OUTPUT, Role.INPUT)

_TIMES = 4.0
"""A dW this many times further from the product of its own operands than the other run's is another."""

_LEAST = 1e-6
"""Distance to the float64 product below which nothing is said: rounding in float32."""

_PROBES = 16
"""Random vectors that a product is applied to, instead of being computed: Freivalds (1977)."""

_GAIN_CHANGE = 1e-5
"""Change of a factor that no rounding explains (as in the policy ``cross_layout``)."""


class OwnFaults:
    """Tells gradients with a fault of their own.

    Args:
        graph: every comparison, linked by what it consumed.
        baseline: its run, for elements.
        candidate: its run.
        gains: what each reduction multiplies by.
    """

    def __init__(self, graph: Graph, baseline: Run, candidate: Run, gains: Gains) -> None:
        self._graph = graph
        self._runs = (baseline, candidate)
        reduced = [n for n in graph.all.nodes if n.key.role is Role.REDUCED_GRAD]
        self._gains = gains
        self._usual = {step: self._median(step, reduced) for step in {node.key.step for node in reduced}}

    def __call__(self, node: Node) -> str:
        """Say by what a divergent gradient shows a fault of its own; empty where nothing does."""
        if node.comparison.verdict is not Verdict.DIVERGED:
            return ""
        if node.key.phase is Phase.REDUCE and node.key.role is Role.REDUCED_GRAD:
            return self._regained(node)
        if node.key.phase is not Phase.WGRAD or node.key.role not in _GRADIENTS:
            return ""
        if self._graph.is_parameter(node.key.fqn):
            return self._changed(node)
        return self._no_product(node)

    def untold(self, node: Node) -> bool:
        """Tell whether a GEMM's dW may hide a fault of its own, since no elements were kept to see it."""
        key, verdict = node.key, node.comparison.verdict
        gemm = (key.phase, key.role, verdict) == (Phase.WGRAD, Role.WGRAD, Verdict.DIVERGED)
        return gemm and not self._graph.is_parameter(key.fqn) and self._product_of(node) is None

    def note(self, origins: Sequence[Origin]) -> str:
        """Say of how many dW in the step of the first origin it cannot be told; empty for none."""
        if not origins:
            return ""
        known = {origin.key for origin in origins}
        nodes = (n for n in self._graph.divergent.nodes if n.key.step == origins[0].key.step)
        count = self._graph.weigh(n for n in nodes if self.untold(n) and n.key not in known)
        if not count:
            return ""
        return (
            f"{count} dW of GEMMs at step {origins[0].key.step} differ as their operands do: whether a GEMM "
            "has a fault of its own as well cannot be told without the operands of both runs "
            "(capture.rules=[{phase: wgrad, level: tensor}])"
        )

    def _changed(self, node: Node) -> str:
        """Compare what reaches a parameter with what its GEMM gave."""
        copies = self._copies(node)
        if copies is None or copies[0] == copies[1] or not all(self._copied):
            return ""
        odd, other = _sides(copies[0])
        return (
            f"in the {other} dW has the bits that the GEMM gave, in the {odd} it was changed on the way to "
            "the parameter"
        )

    def _copies(self, node: Node) -> tuple[bool, bool] | None:
        """Tell by side whether a dW has the bits that one GEMM gave; None where that is not known."""
        sources = [other for other in self._graph.consumed(node) if other.key.role is node.key.role]
        if len(sources) != 1 or node.bits is None or sources[0].bits is None:
            return None
        one, two = (mine == given for mine, given in zip(node.bits, sources[0].bits, strict=True))
        return one, two

    @cached_property
    def _copied(self) -> tuple[bool, bool]:
        """Whether each run copies most dW: where it casts or adds on the way, nothing follows from one."""
        nodes = (n for n in self._graph.all.nodes if n.key.phase is Phase.WGRAD and n.key.role in _GRADIENTS)
        known = [(self._copies(n), n) for n in nodes if self._graph.is_parameter(n.key.fqn)]
        links = [copies for copies, n in known if copies is not None for _ in range(self._graph.weigh([n]))]
        one, two = (2 * sum(link[side] for link in links) > len(links) for side in (0, 1))
        return one, two

    def _product_of(self, node: Node) -> tuple[Pair, Pair, Pair] | None:
        """Return dW, grad_output and input of a GEMM where their elements were kept; else None."""
        consumed = self._graph.consumed(node)
        found = {other.key.role: other.comparison.pair for other in consumed}
        if len(found) < len(consumed):  # ranks of one group had copies that differ: it is a product of none
            return None
        pairs = [node.comparison.pair, *(found.get(role) for role in _OPERANDS)]
        kept = [p for p in pairs if isinstance(p, Pair) and p.baseline.payload and p.candidate.payload]
        if len(kept) < len(pairs):
            return None
        wgrad, *operands = (pair.candidate for pair in kept)
        shapes = [operand.shape[-1] if operand.shape else 0 for operand in operands]
        fits = wgrad.shape == tuple(shapes) and len({r.numel // max(r.shape[-1], 1) for r in operands}) == 1
        return (kept[0], kept[1], kept[2]) if fits else None

    def _no_product(self, node: Node) -> str:
        """Recompute a dW from its own operands, on both sides, in float64."""
        product = self._product_of(node)
        if product is None:
            return ""
        one, two = (
            _distance(*(self._elements(run, node.rank, of(pair)) for pair in product))
            for run, of in zip(self._runs, _OF_SIDE, strict=True)
        )
        if max(one, two) <= _LEAST or max(one, two) <= _TIMES * min(one, two):
            return ""
        odd, other = _sides(one < two)
        return (
            f"dW of the {odd} is not the product of its own operands: {max(one, two):.1e} away from float64, "
            f"that of the {other} {min(one, two):.1e}"
        )

    def _elements(self, run: Run, rank: int, record: TensorRecord) -> NDArray[np.float64]:
        return to_numbers(run.ranks[rank].payload(record)).astype(np.float64)

    def _regained(self, node: Node) -> str:
        pair = node.comparison.pair
        change = self._gains.change(pair) if isinstance(pair, Pair) else None
        usual = self._usual.get(node.key.step, 0.0)
        if change is None or abs(change.change - usual) <= _GAIN_CHANGE + change.error:
            return ""
        return (
            f"the candidate's reduction multiplies it by {1 + change.change:.6f} times what the baseline's "
            f"does, most gradients by {1 + usual:.6f} times"
        )

    def _median(self, step: int, reduced: Iterable[Node]) -> float:
        """Return the usual change of the factor in a step: another number of tokens changes it for all."""
        of_step = (n for n in reduced if n.key.step == step)
        pairs = (n.comparison.pair for n in of_step for _ in range(self._graph.weigh([n])))
        changes = [self._gains.change(pair) for pair in pairs if isinstance(pair, Pair)]
        known = [change.change for change in changes if change is not None]
        return median(known) if known else 0.0


_OF_SIDE: tuple[Callable[[Pair], TensorRecord], ...] = (lambda p: p.baseline, lambda p: p.candidate)


def _sides(candidate_is_odd: bool) -> tuple[str, str]:
    """Return the side that breaks a law, and the one that keeps it."""
    odd = Side.CANDIDATE if candidate_is_odd else Side.BASELINE
    return odd.value, odd.other.value


def _distance(
    wgrad: NDArray[np.float64], grad_output: NDArray[np.float64], received: NDArray[np.float64]
) -> float:
    """Estimate the distance of a dW to grad_output.T @ input, relative to it; the worst row counts.

    Both are applied to the same vectors of signs, so that no product is computed.

    Args:
        wgrad: ``[out, in]``.
        grad_output: ``[..., out]``.
        received: ``[..., in]``.
    """
    signs = np.random.default_rng(0).choice((-1.0, 1.0), size=(received.shape[-1], _PROBES))
    tokens = received.reshape(-1, received.shape[-1]) @ signs
    exact = grad_output.reshape(-1, grad_output.shape[-1]).T @ tokens
    error, size = np.square(wgrad @ signs - exact).mean(axis=1), np.square(exact).mean(axis=1)
    if not size.any():
        return 0.0 if not error.any() else float("inf")
    # a row that is next to nothing counts as one of mean size
    return float(np.sqrt((error / np.maximum(size, size.mean())).max()))
