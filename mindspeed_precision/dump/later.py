"""Records of a rank that are read when somebody asks for them, and not kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import overload

from mindspeed_precision.dump.reader import RankRecords, load_rank
from mindspeed_precision.records import TensorRecord


class LaterRecords(Sequence[TensorRecord]):
    """The records of a rank, read anew each time.

    Args:
        directory: of the rank.
        counts: by step, how many they are.
    """

    def __init__(self, directory: Path, counts: Mapping[int, int]) -> None:
        self._directory = directory
        self._counts = counts

    def _read(self) -> Sequence[TensorRecord]:
        found = load_rank(self._directory)
        return () if found is None else found.records

    def __len__(self) -> int:
        return sum(self._counts.values())

    def __iter__(self) -> Iterator[TensorRecord]:
        return iter(self._read())

    @overload
    def __getitem__(self, index: int) -> TensorRecord: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TensorRecord]: ...

    def __getitem__(self, index: int | slice) -> TensorRecord | Sequence[TensorRecord]:
        return self._read()[index]

    def until(self, step: int) -> int:
        """Return how many are of steps until ``step``; nothing is read."""
        return sum(count for of, count in self._counts.items() if of <= step)


def records_until(rank: RankRecords, step: int) -> int:
    """Return how many records of a rank are of steps until ``step``."""
    if isinstance(rank.records, LaterRecords):
        return rank.records.until(step)
    return sum(record.key.step <= step for record in rank.records)
