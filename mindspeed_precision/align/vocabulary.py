"""Runs whose vocabulary is padded to different sizes: of its parameters the rows that both runs have.

Megatron pads the vocabulary to a multiple of ``make_vocab_size_divisible_by`` times the tensor-parallel size
(``megatron.training`` ``_vocab_size_with_padding``). Rows beyond the true vocabulary are no token's. What is
recorded of a padded tensor is of all its rows; its first rows are digested anew from its elements.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from mindspeed_precision.align.layout import Canonical
from mindspeed_precision.align.shards import CanonicalRank
from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump.reader import RankRecords, Run
from mindspeed_precision.record.placement import of_vocabulary, parameter_of
from mindspeed_precision.record.statistics import digest_host
from mindspeed_precision.records import ParameterDeclaration, RecordKey, TensorRecord

_MODULE = re.compile(r"(?:.*\.)?output_layer")
"""What returns one number for each row of the vocabulary."""

SETTING = "vocab_size"


def vocabulary_size(run: Run) -> int | None:
    """Return how many entries the vocabulary of a run really has, without padding; None: it does not say."""
    settings, config = (run.manifest.get(name) for name in ("settings", "config"))
    asked = settings.get(SETTING) if isinstance(settings, dict) else None
    found = config.get("vocabulary") if isinstance(config, dict) else None
    size = asked or (found.get("size") if isinstance(found, dict) else None)
    return size if type(size) is int and size > 0 else None


@dataclass(frozen=True, kw_only=True)
class Padding:
    """How two runs pad one vocabulary.

    Attributes:
        names: the parameters that have other numbers of rows therefore.
        rows: how many, in the baseline and in the candidate.
        size: entries of the vocabulary; None: no run says, or the runs do not agree.
    """

    names: frozenset[str]
    rows: tuple[int, int]
    size: int | None

    @property
    def text(self) -> str:
        """What differs, in words."""
        one, two = self.rows
        return f"the vocabulary is padded to {one} rows in the baseline and to {two} in the candidate"

    @property
    def common(self) -> int | None:
        """Rows that both runs have of every entry; None: nothing says that the others are padding."""
        return None if self.size is None or self.size > min(self.rows) else min(self.rows)


@dataclass(frozen=True, kw_only=True)
class _CommonRows(CanonicalRank):
    """A lane of which some records have fewer rows than what was recorded."""

    padded: Mapping[int, TensorRecord] = field(default_factory=dict)

    def payload(self, record: TensorRecord) -> HostTensor:
        """Return the elements of a canonical record; see ``CanonicalRank``."""
        whole = self.padded.get(record.seq)
        if whole is None:
            return super().payload(record)
        host = super().payload(whole)
        return replace(host, bits=host.bits[: record.shape[0]])


def padding_of(one: Run, two: Run) -> Padding | None:
    """Return how two canonical runs pad the vocabulary; None where they do it alike."""
    shapes = [{p.fqn: p.shape for p in _parameters(run)} for run in (one, two)]
    rows = {
        name: (shape[0], shapes[1][name][0])
        for name, shape in shapes[0].items()
        if of_vocabulary(name) and _differ_in_rows(shape, shapes[1].get(name, shape))
    }
    if len(set(rows.values())) != 1:  # none, or not one vocabulary
        return None
    known = {size for size in map(vocabulary_size, (one, two)) if size is not None}
    return Padding(
        names=frozenset(rows),
        rows=next(iter(rows.values())),
        size=known.pop() if len(known) == 1 else None,
    )


def _parameters(run: Run) -> tuple[ParameterDeclaration, ...]:
    return next((rank.parameters for rank in run.ranks.values() if rank.parameters), ())


def _differ_in_rows(one: Sequence[int], two: Sequence[int]) -> bool:
    return one != two and one[1:] == two[1:]


def with_common_rows(found: Canonical, padding: Padding) -> Canonical:
    """Return a run whose parameters of the vocabulary have the rows alone that both runs have.

    Records of which no elements were kept, or of which nothing says what is padding, are left without a rule.

    Raises:
        DumpError: elements that are needed cannot be read.
    """
    ranks: dict[int, RankRecords] = {}
    unruled = dict(found.unruled)
    for number, rank in found.run.ranks.items():
        assert isinstance(rank, CanonicalRank)
        unruled |= {r.key: reason for r in rank.records if (reason := _unruled(r, padding))}
        ranks[number] = _cut(rank, padding, unruled)
    return replace(found, run=replace(found.run, ranks=ranks), unruled={**unruled, **found.unruled})


def _unruled(record: TensorRecord, padding: Padding) -> str:
    """Return why a record cannot be compared; empty where it can."""
    if parameter_of(record.key, padding.names) is None:
        return padding.text if _MODULE.fullmatch(record.key.fqn) else ""
    if padding.common is None:
        return f"{padding.text}, and it is not known how many of them are padding: see the setting {SETTING}"
    longer = record.shape[:1] == (max(padding.rows),)
    return f"{padding.text}, and its elements were not kept" if longer and record.payload is None else ""


def _cut(rank: CanonicalRank, padding: Padding, unruled: Mapping[RecordKey, str]) -> _CommonRows:
    records, padded = [], {}
    for record in rank.records:
        longer = record.shape[:1] == (max(padding.rows),) and record.key not in unruled
        if longer and parameter_of(record.key, padding.names) is not None:
            padded[record.seq] = record
            records.append(_first_rows(rank, record, min(padding.rows)))
        else:
            records.append(record)
    kept = {entry.name: getattr(rank, entry.name) for entry in fields(rank) if entry.init}
    changed = {"records": tuple(records), "parameters": tuple(_declared(rank, padding)), "padded": padded}
    return _CommonRows(**{**kept, **changed})


def _first_rows(rank: CanonicalRank, record: TensorRecord, rows: int) -> TensorRecord:
    host = rank.payload(record)
    had, first = record.digest, replace(host, bits=host.bits[:rows])
    digest = digest_host(first, statistics=had.statistics is not None, sketch=had.sketch is not None)
    return replace(record, shape=(rows, *record.shape[1:]), layout=None, digest=digest)


def _declared(rank: CanonicalRank, padding: Padding) -> Iterator[ParameterDeclaration]:
    for parameter in rank.parameters:
        if parameter.fqn not in padding.names:
            yield parameter
        elif padding.common is not None:
            yield replace(parameter, shape=(padding.common, *parameter.shape[1:]))
