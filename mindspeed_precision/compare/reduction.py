"""What the reduction multiplies the sum of all ranks' gradients by: sketches add up as the gradients do.

With several data-parallel ranks the reduced gradient is a sum over what each of them has. The sum of the
ranks' sketches is the sketch of that sum, whatever was rounded before it; its ratio to the sketch of the
reduced gradient is the factor of one run, to the digits of float32.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.align.shards import CanonicalRank
from mindspeed_precision.dump.reader import RankRecords, Run
from mindspeed_precision.record.sketch import BUCKETS, unpack
from mindspeed_precision.records import Phase, Placement, RecordKey, TensorRecord

_EXACT = ("float32", "float64")
"""Types in which a sum over ranks is rounded too little to matter."""

_WORST = 1e-4
"""Largest relative error of a factor that is of use."""


@dataclass(frozen=True, kw_only=True)
class Factor:
    """A factor, and a bound on its error by the rounding of sketches."""

    value: float
    error: float


class Reductions:
    """The sketches of what the ranks of one run have of each gradient before it is reduced, added up.

    Args:
        run: a run, or its canonical one.
    """

    def __init__(self, run: Run) -> None:
        first = next(iter(run.ranks.values()))
        self._run = first.run if isinstance(first, CanonicalRank) else run
        sizes = next(iter(self._run.ranks.values())).coordinates
        self.data_ranks = sizes.dp_size * sizes.cp_size
        # all ranks must be there, and experts are reduced over groups of their own
        self._usable = isinstance(first, CanonicalRank) and sizes.ep_size == 1
        self._usable &= len(self._run.ranks) == sizes.world_size
        self._sums: dict[tuple[str, int], _Sum] | None = None

    def factor(self, key: RecordKey, reduced: TensorRecord) -> Factor | None:
        """Return α = ⟨s, r⟩ / ⟨s, s⟩ of the sum s and the reduced gradient r; None where it is not known.

        Args:
            key: of the reduced gradient.
            reduced: it, whole.
        """
        sketch = reduced.digest.sketch
        if not self._usable or sketch is None or not _exact(reduced):
            return None
        if self._sums is None:
            self._sums = _sums(self._run)
        found = self._sums.get((key.fqn, key.step))
        if found is None or not found.complete:
            return None
        square = float(found.values @ found.values)
        after = unpack(sketch)
        if not square:
            return None
        value = float(found.values @ after) / square
        # what cancels in the sum leaves its rounding
        error = (found.error * abs(value) + sketch.roundoff * float(np.linalg.norm(after))) / math.sqrt(
            square
        )
        return Factor(value=value, error=error) if error <= _WORST * abs(value) else None


def _exact(record: TensorRecord) -> bool:
    """Tell whether a sketch has all elements, next to unrounded: it leaves out what is not finite."""
    return record.dtype in _EXACT and record.digest.finite


class _Sum:
    """A sum of sketches, with the norm of the rounding in it."""

    def __init__(self) -> None:
        self.values: NDArray[np.float64] = np.zeros(BUCKETS)
        self.error = 0.0
        self.complete = True

    def add(self, record: TensorRecord) -> None:
        sketch = record.digest.sketch
        if sketch is None or not _exact(record):
            self.complete = False
            return
        values = unpack(sketch)
        self.values = self.values + values
        self.error += sketch.roundoff * float(np.linalg.norm(values))


def _sums(run: Run) -> dict[tuple[str, int], _Sum]:
    sums: dict[tuple[str, int], _Sum] = defaultdict(_Sum)
    for rank in run.ranks.values():
        placements = {p.fqn: p.placement or Placement(shape=p.shape) for p in rank.parameters}
        for record in _last(rank):
            placement = placements.get(record.key.fqn)
            if placement is not None and _counts(rank, placement):
                sums[placement.copy_of or record.key.fqn, record.key.step].add(record)
    return sums


def _last(rank: RankRecords) -> Iterable[TensorRecord]:
    """Return main_grad after the last microbatch, by parameter and step."""
    found: dict[tuple[str, int], TensorRecord] = {}
    for record in rank.records:
        key = record.key
        if key.phase is Phase.ACCUMULATE and key.slot == "after":
            known = found.get((key.fqn, key.step))
            if known is None or _order(known.key) <= _order(key):
                found[key.fqn, key.step] = record
    return found.values()


def _order(key: RecordKey) -> tuple[int, int]:
    return key.microbatch, key.occurrence


def _counts(rank: RankRecords, placement: Placement) -> bool:
    """Tell whether a rank's gradient is a term of the sum, and no copy of what another rank's is."""
    return bool(placement.splits) or bool(placement.partial) or rank.coordinates.tp_rank == 0
