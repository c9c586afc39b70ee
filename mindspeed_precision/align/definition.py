"""Runs whose fingerprints are of two definitions: the older ones are taken anew, from the elements.

Fingerprints of two definitions say nothing of each other. Where a run kept its elements they are what is
compared; where it did not, the runs cannot be compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mindspeed_precision.counting import count
from mindspeed_precision.dump.format import FINGERPRINT
from mindspeed_precision.dump.reader import RankRecords, Run
from mindspeed_precision.errors import IncomparableError
from mindspeed_precision.record.fingerprint import fingerprints
from mindspeed_precision.record.placement import canonical_index, parameter_of
from mindspeed_precision.record.sketch import sketch_host
from mindspeed_precision.record.statistics import digest_number
from mindspeed_precision.records import Digest, Part, Placement, TensorRecord


def of_one_definition(baseline: Run, candidate: Run) -> tuple[Run, Run, list[str]]:
    """Return two runs whose fingerprints can be compared, and a note where they are not as recorded.

    Raises:
        IncomparableError: they are of two definitions, and a run of the older one did not keep the elements.
        DumpError: a payload is absent or does not fit.
    """
    found = _definitions(baseline) | _definitions(candidate)
    if len(found) < 2:
        return baseline, candidate, []
    renewed = [run if _definitions(run) == {FINGERPRINT} else _renewed(run) for run in (baseline, candidate)]
    older = " and ".join(sorted(found - {FINGERPRINT}))
    note = f"fingerprints of the definition {older} were taken anew, by {FINGERPRINT}, from the elements"
    return renewed[0], renewed[1], [note]


def _definitions(run: Run) -> set[str]:
    return {rank.fingerprint for rank in run.ranks.values()}


def _renewed(run: Run) -> Run:
    lost = [
        record
        for rank in run.ranks.values()
        if rank.fingerprint != FINGERPRINT
        for record in rank.records
        if record.payload is None and not _is_number(record)
    ]
    if lost:
        raise IncomparableError(
            "the fingerprints of the runs are of two definitions, which say nothing of each other",
            where=f"{run.path}: {lost[0].key.describe()}",
            found=f"{count(len(lost), 'record')} by {next(iter(_definitions(run) - {FINGERPRINT}))}, "
            "without elements",
            expected=FINGERPRINT,
            remedy="record this run again with this version; runs of capture.level=tensor can be compared as "
            "they are",
        )
    ranks = {
        number: rank
        if rank.fingerprint == FINGERPRINT
        else replace(rank, records=tuple(_records(rank)), fingerprint=FINGERPRINT)
        for number, rank in run.ranks.items()
    }
    return replace(run, ranks=ranks)


def _is_number(record: TensorRecord) -> bool:
    """Tell whether it is a number of the host, whose bits are in its statistics."""
    return record.layout is None and record.dtype == "float64" and record.value is not None


def _records(rank: RankRecords) -> Iterator[TensorRecord]:
    placements = {declared.fqn: declared.placement for declared in rank.parameters}
    for record in rank.records:
        if record.payload is None:
            assert record.value is not None
            yield replace(record, digest=digest_number(record.value))
            continue
        name, part = parameter_of(record.key, placements), None
        placement = placements[name] if name is not None else None
        if record.part is not None and placement is not None:
            part = Part(placement=placement, start=record.part[0], stop=record.part[1])
        elif isinstance(record.place, Placement) and not record.place.whole:
            part = Part(placement=record.place, start=0, stop=record.numel)
        yield replace(record, digest=_digest(rank, record, part))


def _digest(rank: RankRecords, record: TensorRecord, part: Part | None) -> Digest:
    host = rank.payload(record)
    index = None if part is None else canonical_index(part)
    ordered, unordered = fingerprints(host.bits, index=index)
    sketch = None if record.digest.sketch is None else sketch_host(host, index=index)
    return replace(record.digest, fingerprint=ordered, unordered=unordered, sketch=sketch)
