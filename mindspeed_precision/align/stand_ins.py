"""Ranks that stand for others: of ranks that did alike one alone is aligned and compared (``fold``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from mindspeed_precision.align.ranges import is_divided
from mindspeed_precision.records import RecordKey, TensorRecord

Held = tuple[int, RecordKey]
"""A record: the rank that was kept, and its key."""


@dataclass(frozen=True, kw_only=True)
class StandIns:
    """Which rank stands for which; where nothing is said of a rank, it stands for itself.

    Attributes:
        ranks: by rank, all that it stands for, ascending, itself among them.
        beside: by rank, those of them that are in its own data-parallel replica.
        batches: by slot of the data and step, the sums of the unordered fingerprints of both sides over the
            ranks that another one stands for.
        ranges: by rank and parameter, all ranks whose ranges of the parameter the rank's stands for: the
            records of ranges stand apart from all others (``align.ranges``).
        late: as ``align.ranges.is_divided`` has it.
    """

    ranks: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    beside: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    batches: Mapping[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    ranges: Mapping[tuple[int, str], tuple[int, ...]] = field(default_factory=dict)
    late: bool = False

    def of(self, rank: int, key: RecordKey) -> tuple[int, ...]:
        """Return the ranks for whose record of one key that of a rank stands."""
        found = self.ranges.get((rank, key.fqn))
        if found is not None and is_divided(key, late=self.late):
            return found
        return self.ranks.get(rank, (rank,))

    def near(self, rank: int, key: RecordKey) -> tuple[int, ...]:
        """Return those of them that are in its data-parallel replica."""
        found = self.ranges.get((rank, key.fqn))
        if found is not None and is_divided(key, late=self.late):
            return (rank,)
        return self.beside.get(rank, (rank,))

    def of_ranges_alone(self, rank: int) -> bool:
        """Tell whether a rank was kept for ranges of parameters alone; all else is of the rank for it."""
        return bool(self.ranges) and rank not in self.ranks and rank in self._ranged

    @cached_property
    def _ranged(self) -> frozenset[int]:
        return frozenset(rank for rank, _ in self.ranges)

    def held(self, rank: int, records: dict[RecordKey, TensorRecord]) -> dict[RecordKey, TensorRecord]:
        """Return of a rank's records those that are to be compared: not what another rank stands for."""
        if not self.of_ranges_alone(rank):
            return records
        return {key: record for key, record in records.items() if is_divided(key, late=self.late)}

    def updated(self, rank: int, fqn: str) -> int:
        """Return on how many ranks a parameter is updated as it is on one."""
        return len(self.ranges.get((rank, fqn)) or self.ranks.get(rank, (rank,)))

    def weight(self, rank: int, key: RecordKey) -> int:
        """Return for how many ranks' records one stands."""
        return len(self.of(rank, key))

    def weigh(self, records: Iterable[Held]) -> int:
        """Return how many records these are of, given those of the ranks that were kept."""
        return sum(len(self.of(rank, key)) for rank, key in records)

    def expanded(self, records: Iterable[Held]) -> tuple[int, ...]:
        """Return all ranks that have one of these records, ascending."""
        return tuple(sorted({one for rank, key in records for one in self.of(rank, key)}))

    def alike(self, rank: int) -> int:
        """Return for how many ranks one stands with all that is of no range."""
        return len(self.ranks.get(rank, (rank,)))

    def every(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return all ranks for which some stand with anything, ascending."""
        found = {one for rank in ranks for one in self.ranks.get(rank, (rank,))}
        return tuple(sorted(found))
