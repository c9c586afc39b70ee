"""dW of an expert, summed over a step: what two runs share that send it the tokens of other ranks.

Over which ranks experts are spread decides which tokens one product has. Over a step, and over all ranks that
have the expert, their sum has every token that was sent to it, in every layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from mindspeed_precision.align.shards import Shard
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.records import NO_MICROBATCH, Phase, RecordKey, Role

_GRADIENTS = (Role.WGRAD, Role.BGRAD)
INCOMPLETE = "not every rank and microbatch of a step recorded an expert's dW"


class StepSums:
    """The terms of these sums, as they are found.

    Args:
        run: as recorded.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._found: dict[RecordKey, list[Shard]] = defaultdict(list)
        self._names: dict[RecordKey, str] = {}

    def add(self, key: RecordKey, shard: Shard, name: str) -> None:
        """Add a rank's dW of one microbatch, of a parameter; records of other kinds are none of these."""
        if key.phase is Phase.WGRAD and key.role in _GRADIENTS and not shard.part.placement.partial:
            whole = replace(key, microbatch=NO_MICROBATCH, occurrence=0)
            self._found[whole].append(shard)
            self._names[whole] = name

    def __iter__(self) -> Iterator[tuple[RecordKey, list[Shard]]]:
        """Yield the key of each sum with its terms."""
        for key, found in self._found.items():
            places: dict[tuple[object, ...], list[Shard]] = defaultdict(list)
            for shard in found if key not in self.incomplete else ():
                places[shard.place].append(shard)
            terms = [
                replace(shard, term=(number, len(members)))
                for members in places.values()
                for number, shard in enumerate(members)
            ]
            if terms:
                yield key, terms

    @cached_property
    def incomplete(self) -> frozenset[RecordKey]:
        """Keys of the sums of which a rank did not record every microbatch."""
        holders: dict[str, list[int]] = defaultdict(list)
        for number, rank in self._run.ranks.items():
            for parameter in rank.parameters:
                holders[parameter.fqn].append(number)
        return frozenset(key for key in self._found if not self._whole(key, holders[self._names[key]]))

    def _whole(self, key: RecordKey, ranks: list[int]) -> bool:
        seen: dict[int, set[int]] = defaultdict(set)
        for shard in self._found[key]:
            seen[shard.rank].add(shard.record.key.microbatch)
        return all(len(seen[rank]) == self._run.ranks[rank].microbatches[key.step] for rank in ranks)
