"""Samples as the batches of a run, so that ``verify`` tells how two sides of any origin differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump.reader import RankRecords, Run
from mindspeed_precision.errors import DumpError
from mindspeed_precision.record.elements import to_bits
from mindspeed_precision.record.statistics import digest_host
from mindspeed_precision.records import Phase, RankCoordinates, RecordKey, Role, Side, TensorRecord
from mindspeed_precision.samples.sources import Sample, Source
from mindspeed_precision.verify.pair.data import data
from mindspeed_precision.verify.pair_facts import PairFacts, pair_facts
from mindspeed_precision.verify.registry import Answer

_HELD = "held"
"""Said to be the file of elements that were never in one."""


@dataclass(frozen=True, kw_only=True)
class _HeldRank(RankRecords):
    """Records whose elements are in memory."""

    held: Mapping[int, HostTensor] = field(default_factory=dict)

    def payload(self, record: TensorRecord) -> HostTensor:
        """Return the elements of a record."""
        if record.seq not in self.held:
            raise DumpError("no elements were kept of this record", where=record.key.describe())
        return self.held[record.seq]


def judged(one: Source, two: Source) -> Answer:
    """Tell whether two sides have the same samples, and if not, how they differ.

    Two runs are compared in all their batches, from fingerprints; else the samples that both sides have are.

    Raises:
        IncomparableError: the fingerprints of two runs are of two definitions, and elements were not kept.
    """
    if one.run is not None and two.run is not None:
        return data(pair_facts(one.run, two.run))
    count = min(len(one.samples), len(two.samples))
    common = _common(one.samples[:count], two.samples[:count])
    runs = [
        _run(source, [_only(sample, common) for sample in source.samples[:count]]) for source in (one, two)
    ]
    if not common or not count:
        names = [sorted({slot for sample in s.samples for slot in sample.slots}) for s in (one, two)]
        return Answer(
            exercised=0, skipped=f"no tensor is in both: {names[0]} in the one, {names[1]} in the other"
        )
    nothing: dict[Side, Mapping[str, str]] = {side: {} for side in Side}
    return data(PairFacts(baseline=runs[0], candidate=runs[1], settings={}, names=nothing))


def _common(one: Sequence[Sample], two: Sequence[Sample]) -> set[str]:
    sides = [
        set.intersection(*(set(sample.slots) for sample in side)) if side else set() for side in (one, two)
    ]
    return sides[0] & sides[1]


def _only(sample: Sample, slots: set[str]) -> dict[str, np.ndarray]:
    return {slot: value for slot, value in sample.slots.items() if slot in slots}


def _run(source: Source, samples: Sequence[Mapping[str, np.ndarray]]) -> Run:
    """Return a run of one step whose microbatches are the samples."""
    records: list[TensorRecord] = []
    held: dict[int, HostTensor] = {}
    for number, slots in enumerate(samples):
        for slot, value in slots.items():
            host = _host(value)
            record = TensorRecord(
                seq=len(records),
                key=RecordKey(
                    step=0, microbatch=number, phase=Phase.BATCH, fqn="batch", role=Role.BATCH, slot=slot
                ),
                shape=host.bits.shape,
                dtype=host.dtype,
                layout=None,
                digest=digest_host(host, statistics=True),
                payload=_HELD,
            )
            held[record.seq] = host
            records.append(record)
    rank = _HeldRank(
        directory=Path(source.path),
        coordinates=RankCoordinates(),
        records=tuple(records),
        steps=(0,),
        parameters=(),
        microbatches={0: len(samples)},
        complete=True,
        held=held,
    )
    return Run(path=Path(source.path), manifest={}, ranks={0: rank})


def _host(value: np.ndarray) -> HostTensor:
    """Return a tensor as both sides have it: integers of any width are the same numbers."""
    if value.dtype.kind in "iub":
        whole = np.ascontiguousarray(value, dtype=np.int64)
        return HostTensor(bits=whole.view(np.uint64), dtype="int64")
    return HostTensor(bits=to_bits(value.astype(np.float64), "float64"), dtype="float64")


__all__ = ["judged"]
