"""Gradients that are zero in mathematics and noise in practice, found by the size of what was summed.

The gradient of a bias is a sum over tokens. Where its terms cancel (keys may all be shifted by one vector,
the softmax does not see it), what is left is their rounding, and two frameworks agree in none of its digits.
Terms of independent sign would leave about ``sqrt(tokens) * rms(grad_output)``; a sum far below that has
cancelled.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.dump.reader import Run
from mindspeed_precision.record.elements import to_numbers
from mindspeed_precision.records import (
    NO_MICROBATCH,
    Pair,
    Phase,
    RecordKey,
    Role,
    Statistics,
    TensorRecord,
)

GRADIENT_ROLES = frozenset(
    {Role.WGRAD, Role.BGRAD, Role.MAIN_GRAD, Role.REDUCED_GRAD, Role.EXP_AVG, Role.EXP_AVG_SQ}
)
"""Records that are a gradient or a mean of gradients."""

_PLAIN_GRADIENTS = (Role.REDUCED_GRAD, Role.MAIN_GRAD, Role.BGRAD, Role.WGRAD)

_Place = tuple[int, str, int, int]
"""Rank, module, step, microbatch."""


@dataclass
class _Sources:
    """What one module's gradient was computed from, in one microbatch: norms and shape of both sides."""

    norm: float = 0.0
    tokens: int = 0
    columns: int = 0
    input_norm: float = 0.0


class Cancellation:
    """The magnitude of the terms that each gradient is the sum of, from the statistics of both runs.

    Args:
        baseline: its run, for elements.
        candidate: its run.
        pairs: every pair of the two.
    """

    def __init__(self, baseline: Run, candidate: Run, pairs: Iterable[Pair]) -> None:
        self._runs = (baseline, candidate)
        self._sources: dict[_Place, _Sources] = defaultdict(_Sources)
        self._gradients: dict[tuple[int, str], list[Pair]] = defaultdict(list)
        self._scales: dict[tuple[int, str], dict[tuple[int, int], float]] = {}
        for pair in pairs:
            if pair.key.role in (Role.GRAD_OUTPUT, Role.INPUT):
                self._add_source(pair)
            elif pair.key.role in _PLAIN_GRADIENTS:
                self._gradients[pair.rank, pair.key.fqn].append(pair)

    def _add_source(self, pair: Pair) -> None:
        key = pair.key
        norms = [_norm(record) for record in (pair.baseline, pair.candidate)]
        number = "float" in pair.candidate.dtype
        if not number or not pair.candidate.shape or None in norms or key.slot not in ("", "0"):
            return
        norm = max(n for n in norms if n is not None)
        sources = self._sources[pair.rank, key.fqn, key.step, key.microbatch]
        if key.role is Role.INPUT and key.phase in (Phase.WGRAD, Phase.FPROP):
            sources.input_norm = max(sources.input_norm, norm)
        elif key.role is Role.GRAD_OUTPUT and key.phase in (Phase.WGRAD, Phase.DGRAD):
            sources.norm = max(sources.norm, norm)
            sources.columns = pair.candidate.shape[-1]
            sources.tokens = max(pair.candidate.numel // max(sources.columns, 1), 1)

    def scale(self, rank: int, key: RecordKey) -> float:
        """Return the rms that an element of a gradient has where nothing cancels; 0 where that is not known.

        Bias: ``sqrt(tokens) * rms(grad_output)``. Weight of a linear layer:
        ``sqrt(tokens) * rms(grad_output) * rms(input)``. For records of several microbatches their sum, for
        means over steps the largest step.
        """
        found = self._of_parameter(rank, key.fqn)
        if key.microbatch != NO_MICROBATCH and key.role is not Role.MAIN_GRAD:
            return found.get((key.step, key.microbatch), 0.0)
        sums: dict[int, float] = defaultdict(float)
        for (step, _), value in found.items():
            sums[step] += value
        if key.role in (Role.EXP_AVG, Role.EXP_AVG_SQ):
            largest = max((value for step, value in sums.items() if step <= key.step), default=0.0)
            return largest if key.role is Role.EXP_AVG else largest**2
        return sums.get(key.step, 0.0)

    def _of_parameter(self, rank: int, fqn: str) -> dict[tuple[int, int], float]:
        if not self._scales:
            self._scales = self._all_scales()
        return self._scales.get((rank, fqn), {})

    def _all_scales(self) -> dict[tuple[int, str], dict[tuple[int, int], float]]:
        scales: dict[tuple[int, str], dict[tuple[int, int], float]] = defaultdict(dict)
        for (rank, module, step, microbatch), found in self._sources.items():
            if not found.norm:
                continue
            bias = found.norm / math.sqrt(found.columns)
            scales[rank, f"{module}.bias"][step, microbatch] = bias
            inner = self._weight_columns(rank, module)
            if found.input_norm and inner:
                weight = found.norm * found.input_norm / math.sqrt(found.tokens * found.columns * inner)
                scales[rank, f"{module}.weight"][step, microbatch] = weight
                scales[rank, module][step, microbatch] = weight  # dW at the GEMM has the module's name
        return scales

    def _weight_columns(self, rank: int, module: str) -> int:
        """Return the last dimension of a two-dimensional weight's gradient; 0 where there is none."""
        for name in (f"{module}.weight", module):
            for pair in self._gradients.get((rank, name), [])[:1]:
                if len(pair.candidate.shape) == 2:
                    return pair.candidate.shape[1]
        return 0

    def noise(
        self, pair: Pair, below: float, elements: tuple[NDArray[np.float64], NDArray[np.float64]] | None
    ) -> NDArray[np.bool_] | None:
        """Tell which elements of a gradient are noise on both sides.

        A noise element that is large on one side is none: both must lie below.

        Args:
            pair: a gradient, or a mean of gradients.
            below: share of ``scale`` under which a sum has cancelled.
            elements: both sides, ``[...]``; None where they were not kept: then only a tensor that is noise
                as a whole can be told, by its norm.

        Returns:
            ``[...]`` bool, or ``[]`` for a tensor that is noise as a whole and has no elements; None: nothing
            is known to be noise.
        """
        scale = self.scale(pair.rank, pair.key)
        if elements is not None and elements[0].size and pair.key.role is not Role.EXP_AVG_SQ:
            # an element this far below its own tensor has no sign either
            scale = max(scale, min(float(np.sqrt(np.square(side).mean())) for side in elements))
        limit = scale * (below**2 if pair.key.role is Role.EXP_AVG_SQ else below)
        if not limit:
            return None
        if elements is not None:
            one, two = (np.abs(side) for side in elements)
            mask = np.asarray((one <= limit) & (two <= limit) & (one + two > 0))  # nothing is no noise
            return mask if mask.any() else None
        norms = [_norm(record) for record in (pair.baseline, pair.candidate)]
        whole = all(n is not None and n <= limit * math.sqrt(pair.candidate.numel) for n in norms)
        return np.asarray(True) if whole else None

    def noise_since_start(
        self, pair: Pair, below: Callable[[int], float], start: int = 0
    ) -> NDArray[np.bool_] | None:
        """Tell which elements of a parameter have had noise for a gradient in any step up to its own.

        Args:
            pair: a parameter after an update.
            below: by step, the share under which a gradient is noise.
            start: the step at which both runs had one state.

        Returns:
            ``[...]`` bool of the parameter's shape; ``[]`` True where all are by norm alone; None where the
            gradients' elements were not kept, so that it is not known.
        """
        total: NDArray[np.bool_] | None = None
        steps: dict[int, Pair] = {}
        for gradient in self._gradients.get((pair.rank, pair.key.fqn), []):
            known = steps.get(gradient.key.step)
            usable = gradient.candidate.shape == pair.candidate.shape and gradient.key.slot != "before"
            if start <= gradient.key.step <= pair.key.step and usable:
                steps[gradient.key.step] = (
                    known if known is not None and _better(known, gradient) else gradient
                )
        if not steps:
            return None
        for gradient in steps.values():
            elements = self.elements(gradient)
            mask = self.noise(gradient, below(gradient.key.step), elements)
            if elements is None and mask is None:
                return None
            mask = np.zeros(pair.candidate.shape, bool) if mask is None else mask
            total = mask if total is None else total | mask
        return total

    def elements(self, pair: Pair) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """Return the elements of both sides as float64; None where one side has none."""
        if pair.baseline.payload is None or pair.candidate.payload is None:
            return None
        one, two = (
            to_numbers(run.ranks[pair.rank].payload(record)).astype(np.float64)
            for run, record in zip(self._runs, (pair.baseline, pair.candidate), strict=True)
        )
        return one, two


def _better(known: Pair, other: Pair) -> bool:
    """Tell whether a gradient of a step says no less of it than another: reduced, then later ones."""
    order = [_PLAIN_GRADIENTS.index(pair.key.role) for pair in (known, other)]
    kept = [pair.candidate.payload is not None for pair in (known, other)]
    if kept[0] != kept[1]:
        return kept[0]
    return order[0] < order[1] or (order[0] == order[1] and known.key.microbatch > other.key.microbatch)


def _norm(record: TensorRecord) -> float | None:
    statistics: Statistics | None = record.digest.statistics
    return None if statistics is None else statistics.l2_norm
