"""What the parts of a run gave, in as much memory as there may be."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed_precision.dump.format import rank_directory
from mindspeed_precision.dump.reader import RankRecords, Run, nothing_written, run_of
from mindspeed_precision.errors import DumpError, PrecisionError
from mindspeed_precision.records import TensorRecord
from mindspeed_precision.verify.cells.plan import PER_RECORD
from mindspeed_precision.verify.cells.work import Answers, CellOutcome, Name, known_laws
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.survey import Survey


class Gathered:
    """What the parts of a run gave.

    Args:
        budget: bytes of memory for records that laws of the whole run need.
    """

    def __init__(self, budget: int) -> None:
        self.answers: dict[Name, list[Answer]] = defaultdict(list)
        self.of_cells: list[Answers] = []
        self.surveys: dict[int, Survey] = {}
        self.ranks: dict[int, RankRecords] = {}
        self.absent: list[int] = []
        self.records: dict[Name, list[tuple[int, TensorRecord]]] = defaultdict(list)
        self.needs: Counter[Name] = Counter()
        self.staged: Counter[int] = Counter()
        self.effective: dict[str, Mapping[str, Any]] = {}
        self._parameters: dict[Any, Any] = {}
        self.budget = budget
        self._dropped: set[Name] = set()

    def take(self, outcome: CellOutcome) -> None:
        """Take what a cell gave; what ranks have alike is kept once.

        Raises:
            PrecisionError: a worker knows other laws.
        """
        if outcome.laws != known_laws():
            raise PrecisionError(
                "the processes that check know other laws than this one",
                found=f"{len(outcome.laws)} laws",
                expected=f"{len(known_laws())}",
                remedy="--jobs 1, or register laws of your own where the main module is imported",
            )
        if outcome.survey is not None:
            self.surveys[len(self.of_cells)] = outcome.survey
        self.of_cells.append(outcome.answers)
        self.absent += outcome.absent
        self.staged.update(outcome.staged)
        for number, rank in outcome.ranks.items():
            effective = self.effective.setdefault(json.dumps(rank.effective), rank.effective)
            parameters = self._parameters.setdefault(rank.parameters, rank.parameters)
            self.ranks[number] = replace(rank, effective=effective, parameters=parameters)
        for name, found in outcome.records.items():
            self.needs[name] += len(found) * PER_RECORD
            if name not in self._dropped:
                self.records[name] += found
        self._keep_within_budget()

    def _keep_within_budget(self) -> None:
        """Forget the records of the laws that need most, as long as all do not fit."""
        while self.records and sum(self.needs[name] for name in self.records) > self.budget:
            largest = max(self.records, key=lambda name: (self.needs[name], name))
            del self.records[largest]
            self._dropped.add(largest)

    def add(self, answers: Answers) -> None:
        """Take what laws say of more than a cell."""
        for name, answer in answers.items():
            self.answers[name].append(answer)

    def run(self, path: Path, manifest: dict[str, Any]) -> Run:
        """Return the run without its records.

        Raises:
            DumpError: no rank of it wrote anything.
        """
        if not self.ranks:
            raise DumpError("no rank of this run wrote anything", where=str(path), expected=rank_directory(0))
        ranks = dict(sorted(self.ranks.items()))
        notes: list[str] = []
        for number in sorted((*ranks, *self.absent)):
            if number not in ranks:
                notes.append(nothing_written(number))
                continue
            notes += [f"rank {number}: {note}" for note in ranks[number].notes]
        return run_of(path, manifest, ranks, notes)


__all__ = ["Gathered"]
