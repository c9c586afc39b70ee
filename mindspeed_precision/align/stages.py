"""Which part of a model a record is of: its pipeline stage, and the stage's chunk where stages interleave.

Interleaved, a microbatch goes through the first chunk of every stage, then through the second of every stage
(Narayanan et al., *Efficient large-scale language model training on GPU clusters using Megatron-LM*, 2021,
section 2.2). Names are those of the whole model, so that a name tells the chunk: the layers of one chunk
follow each other, and other stages' layers lie between those of two. A module with a part in every chunk (the
decoder, the model) has one name; in each microbatch it is called once for each chunk, the first chunk first.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from mindspeed_precision.align.lanes import setting
from mindspeed_precision.align.places import Slot, of_collective, of_module, slot_of
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.records import ParameterDeclaration, Phase, RecordKey, Role

_LAYER = re.compile(r"(.*?\blayers)\.(\d+)\.")

ModelPart = tuple[int, int]
"""Chunk and stage, ordered as the forward pass goes through them."""


class Stages:
    """The parts of a run's model.

    Args:
        run: as recorded.

    Attributes:
        chunks: how many a rank has.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        found = setting(run, "transformer_config", "virtual_pipeline_model_parallel_size")
        self.chunks = max(found, 1) if isinstance(found, int) else 1  # None and False: they do not interleave
        self._known: dict[int, dict[str, int]] = {}

    def part(self, rank: int, key: RecordKey) -> ModelPart:
        """Return the part of the model that a rank's record is of."""
        stage = self._run.ranks[rank].coordinates.pp_rank
        return (self._chunk(rank, key) if self.chunks > 1 else 0), stage

    def _chunk(self, rank: int, key: RecordKey) -> int:
        if key.phase is Phase.LOSS:
            return self.chunks - 1
        if rank not in self._known:
            self._known[rank] = chunks_by_name(self._run.ranks[rank].parameters)
        known, name = self._known[rank], key.fqn
        while name and name not in known:
            name = name.rpartition(".")[0]
        return known.get(name, min(key.occurrence, self.chunks - 1))

    def spanning(self) -> frozenset[str]:
        """Return the names of modules of which several stages have a part: the decoder, the model."""
        stages: dict[str, set[int]] = defaultdict(set)
        for rank in self._run.ranks.values():
            for record in rank.records:
                if of_module(record.key):
                    stages[record.key.fqn].add(rank.coordinates.pp_rank)
        return frozenset(name for name, found in stages.items() if len(found) > 1)

    def ends(self, spanning: frozenset[str]) -> dict[Slot, ModelPart]:
        """Return which part has what a whole module receives and returns, of modules with several parts.

        Its inputs are those of the first part that is given them (labels come to the last one alone), its
        outputs those of the last part. Of a module that a rank does not call once for each of its chunks it
        is not known.
        """
        slots: dict[Slot, list[ModelPart]] = defaultdict(list)
        parts: dict[str, list[ModelPart]] = defaultdict(list)
        calls: dict[tuple[str, int], set[int]] = defaultdict(set)
        for number, rank in self._run.ranks.items():
            for key in (record.key for record in rank.records):
                if key.fqn in spanning and of_module(key) and not of_collective(key):
                    part = self.part(number, key)
                    slots[slot_of(key)].append(part)
                    parts[key.fqn].append(part)
                    calls[key.fqn, number].add(key.occurrence)
        each = set(range(self.chunks))
        unknown = {name for (name, _), seen in calls.items() if self.chunks > 1 and seen != each}
        inputs = Role.INPUT, Role.GRAD_INPUT
        return {
            slot: min(held) if slot[1] in inputs else max(parts[slot[0]])
            for slot, held in slots.items()
            if slot[0] not in unknown
        }


def chunks_by_name(parameters: Iterable[ParameterDeclaration]) -> dict[str, int]:
    """Return the chunk of each module and parameter that only one chunk of a rank has.

    Args:
        parameters: of the rank, as it declared them: chunk by chunk, in the order of the model.
    """
    found: dict[str, set[int]] = defaultdict(set)
    last: dict[str, int] = {}
    chunk = 0
    for parameter in parameters:
        layer = _LAYER.match(parameter.fqn)
        if layer is not None:
            stack, number = layer.group(1), int(layer.group(2))
            chunk += number > last.get(stack, number) + 1
            last[stack] = number
        name = parameter.fqn
        while name:
            found[name].add(chunk)
            name = name.rpartition(".")[0]
    return {name: chunks.pop() for name, chunks in found.items() if len(chunks) == 1}
