"""Ranks that stand for others: of ranks that did alike one alone is aligned and compared (``fold``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class StandIns:
    """Which rank stands for which; where nothing is said of a rank, it stands for itself.

    Attributes:
        ranks: by rank, all that it stands for, ascending, itself among them.
        beside: by rank, those of them that are in its own data-parallel replica.
        batches: by slot of the data and step, the sums of the unordered fingerprints of both sides over the
            ranks that another one stands for.
    """

    ranks: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    beside: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    batches: Mapping[tuple[str, int], tuple[int, int]] = field(default_factory=dict)

    def of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that one stands for."""
        return self.ranks.get(rank, (rank,))

    def near(self, rank: int) -> tuple[int, ...]:
        """Return those of them that are in its data-parallel replica."""
        return self.beside.get(rank, (rank,))

    def weight(self, rank: int) -> int:
        """Return how many ranks one stands for."""
        return len(self.of(rank))

    def weigh(self, ranks: Iterable[int]) -> int:
        """Return how many records these are of, given the rank of each that was kept."""
        return sum(map(self.weight, ranks))

    def expanded(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return all ranks that some stand for, ascending."""
        return tuple(sorted({one for rank in ranks for one in self.of(rank)}))
