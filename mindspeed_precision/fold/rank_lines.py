"""One rank's index, read as columns: what changes from rank to rank apart from what does not.

The lines of two ranks that computed alike are equal but for fingerprints and statistics. Those are taken out
as columns; the rest, the template, is kept as a digest, without which ranks a collective was over: replicas
have groups of their own. Equal templates are equal lines, so that one of them needs to be parsed: the strict
reader does that, once for each template that a worker meets.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.dump.format import (
    COMPLETE,
    FINGERPRINT,
    INDEX,
    SCHEMA,
    Header,
    parse_line,
)
from mindspeed_precision.dump.inside import read_inside, require_inside
from mindspeed_precision.dump.reader import check_seal
from mindspeed_precision.fold.divided import Divided, counted, divide, has_ranges, without_groups
from mindspeed_precision.records import RankCoordinates

Words = NDArray[np.uint64]
Counts = NDArray[np.int64]
Positions = NDArray[np.int64]

_NUMBER = rb'(?:-?\d+(?:\.\d+)?(?:e[-+]?\d+)?|"nan"|"-?inf")'
_DIGEST = re.compile(
    rb'"fingerprint":"([0-9a-f]{16})","unordered":"([0-9a-f]{16})","statistics":'
    rb'(null|\{"minimum":'
    + _NUMBER
    + rb',"maximum":'
    + _NUMBER
    + rb',"mean":'
    + _NUMBER
    + rb',"l2_norm":'
    + _NUMBER
    + rb',"zeros":(\d+),"nans":(\d+),"infs":(\d+),"exponents":\{[0-9":,]*\}\})'
)
_GROUPS = 7
"""Pieces of a split: what is before a digest, and six groups of it."""

_APART = b'\n{"kind":"p'
"""How a line begins that declares parameters or a place, or tells a problem."""


@dataclass(frozen=True, kw_only=True)
class RankLines:
    """An index, by columns.

    Attributes:
        coordinates: of its header.
        template: digest of the lines of records and markers, without what is in the columns.
        first: ``[records]`` fingerprints.
        unordered: ``[records]``.
        statistics: ``[records]`` as text; ``null`` for none.
        zeros: ``[records]`` elements that are zero; -1 without statistics.
        nans: likewise.
        infs: likewise.
        declared: lines of parameters.
        places: lines of places.
        counts: by step, how many records it has.
        divided: which records are of ranges; None: none is, or all ranks of the run have all of them.
        text: the lines of records and markers.
    """

    coordinates: RankCoordinates
    template: bytes
    first: Words
    unordered: Words
    statistics: list[bytes]
    zeros: Counts
    nans: Counts
    infs: Counts
    declared: tuple[bytes, ...]
    places: tuple[bytes, ...]
    counts: Mapping[int, int]
    divided: Divided | None = None
    text: bytes = b""

    def of(self, at: Positions, template: bytes) -> RankLines:
        """Return some of its records, as a rank of their own."""
        return replace(
            self,
            template=template,
            first=self.first[at],
            unordered=self.unordered[at],
            statistics=[self.statistics[number] for number in at],
            zeros=self.zeros[at],
            nans=self.nans[at],
            infs=self.infs[at],
            divided=None,
            text=b"",
        )


def read_lines(directory: Path, *, late: bool = False) -> RankLines | None:
    """Read the index of a rank that ended as planned.

    Args:
        directory: of the rank.
        late: parameters are gathered beside the next forward (``align.ranges.is_divided``).

    Returns:
        The columns; None for a rank that must be read line by line: it did not end as planned, could not take
        a record, or is of another schema.

    Raises:
        DumpError: the index is not what was sealed, or the file is none of this run.
    """
    require_inside(directory, directory.parent)
    seal = directory / COMPLETE
    if not seal.exists() or not (directory / INDEX).is_file():
        return None
    data = read_inside(directory / INDEX, directory.parent)
    check_seal(seal, data, data.count(b"\n"))
    head, _, _ = data.partition(b"\n")
    if not data.endswith(b"\n") or b'"kind":"header"' not in head:
        return None
    header = parse_line(head, where=f"{directory / INDEX}:1")
    if not isinstance(header, Header) or (header.schema, header.fingerprint) != (SCHEMA, FINGERPRINT):
        return None
    rest, apart = _taken_out(data, len(head))
    if any(line.startswith(b'{"kind":"problem"') for line in apart):
        return None
    pieces = _DIGEST.split(rest)
    where, divided = header.coordinates, None
    if max(where.dp_size, where.cp_size, where.ep_size) > 1 and has_ranges(rest):
        divided = divide(rest, pieces[::_GROUPS], late=late)
        if divided is None:
            return None
    statistics = pieces[3::_GROUPS]
    known = np.array([text != b"null" for text in statistics], np.bool_)
    zeros, nans, infs = (_counts(pieces[group::_GROUPS], known) for group in (4, 5, 6))
    return RankLines(
        coordinates=where,
        template=hashlib.blake2b(without_groups(b"".join(pieces[::_GROUPS])), digest_size=16).digest(),
        first=_words(pieces[1::_GROUPS]),
        unordered=_words(pieces[2::_GROUPS]),
        statistics=statistics,
        zeros=zeros,
        nans=nans,
        infs=infs,
        declared=tuple(line for line in apart if line.startswith(b'{"kind":"parameters"')),
        places=tuple(line for line in apart if line.startswith(b'{"kind":"placement"')),
        counts=counted(rest),
        divided=divided,
        text=b"" if divided is None else rest,
    )


def _taken_out(data: bytes, start: int) -> tuple[bytes, list[bytes]]:
    """Return the lines after the first one without those of parameters, places and problems, and these."""
    kept, apart = [], []
    while (found := data.find(_APART, start)) >= 0:
        end = data.index(b"\n", found + 1)
        kept.append(data[start:found])
        apart.append(data[found + 1 : end])
        start = end
    kept.append(data[start:])
    return b"".join(kept), apart


def _words(texts: list[bytes]) -> Words:
    raw = bytes.fromhex(b"".join(texts).decode())
    return np.frombuffer(raw, ">u8").astype(np.uint64)


def _counts(texts: list[bytes | None], known: NDArray[np.bool_]) -> Counts:
    found = np.full(len(texts), -1, np.int64)
    if known.any():
        found[known] = [int(text) for text in texts if text is not None]
    return found
