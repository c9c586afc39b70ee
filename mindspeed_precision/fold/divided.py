"""The lines of a rank with a distributed optimizer: those of its ranges apart from what all replicas have.

What a range is (which elements, how many) is a label: the lines of a parameter's ranges on two ranks are
alike but for it, for their numbers in the rank, and for where the range begins in a buffer.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.align.ranges import is_divided
from mindspeed_precision.records import Phase, RecordKey, Role

_RANGED = re.compile(rb'"phase":"reduce","fqn":"([^"\\]*)","role":"reduced_grad","slot":"\d+:\d+"')
RECORD = b'{"kind":"record","seq":'
"""How the line of a record begins."""

_MARKER = re.compile(rb'(\{"kind":"step","step":(-?\d+),"records":)(\d+)')
_OF_PARAMETER = re.compile(
    rb'"step":-?\d+,"microbatch":-1,"phase":"(init|reduce|clip|optimizer)","fqn":"([^"\\]*)","role":"(\w+)",'
)
_SLOT = re.compile(rb'"slot":"(\d+):(\d+)"')
_SHAPE = re.compile(rb'"shape":\[([\d,]*)\]')
_PART = re.compile(rb'"part":\[(\d+),(\d+)\]')
_OFFSET = re.compile(rb'"storage_offset":\d+')
_GROUP = re.compile(rb'"note":"over [^"\\]*"')


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The records of one parameter's range, with those of the parameter that all replicas have.

    Attributes:
        fqn: the parameter.
        at: ``[records]`` their positions in the rank, ascending.
        own: ``[records]`` which of them are of the range.
        numels: ``[records]`` elements of each.
        template: digest of their lines, without what is in the columns and without the range.
        label: digest of the ranges.
    """

    fqn: str
    at: NDArray[np.int64]
    own: NDArray[np.bool_]
    numels: NDArray[np.int64]
    template: bytes
    label: bytes


@dataclass(frozen=True, kw_only=True)
class Divided:
    """A rank's lines, divided.

    Attributes:
        shared: ``[records]`` positions of the records that are of no range.
        template: digest of their lines and of the markers, without what is in the columns.
        pieces: one for each parameter of which the rank has a range, in the order in which they are met.
    """

    shared: NDArray[np.int64]
    template: bytes
    pieces: tuple[Piece, ...]


def without_groups(text: bytes) -> bytes:
    """Return lines without which ranks a collective was over: replicas have groups of their own."""
    return _GROUP.sub(b'"note":"over"', text)


def has_ranges(text: bytes) -> bool:
    """Tell whether lines are of a distributed optimizer."""
    return _RANGED.search(text) is not None


def counted(text: bytes) -> Mapping[int, int]:
    """Return by step how many records the markers say that it has."""
    found: dict[int, int] = {}
    for match in _MARKER.finditer(text):
        found[int(match[2])] = found.get(int(match[2]), 0) + int(match[3])
    return found


def divide(text: bytes, between: Sequence[bytes], *, late: bool) -> Divided | None:
    """Divide the lines of a rank.

    Args:
        text: lines of records and markers.
        between: what is before, between and behind the digests of their records.
        late: as ``align.ranges.is_divided`` has it.

    Returns:
        None where a line is not as it should be: the strict reader says what is wrong.
    """
    names = set(_RANGED.findall(text))
    lines = _Lines(names, late=late)
    for number, piece in enumerate(between):
        tail, *whole = piece.split(b"\n")
        if not whole or not lines.end(tail) or not all(lines.mark(line) for line in whole[:-1]):
            return None
        if number < len(between) - 1 and not lines.begin(whole[-1]):
            return None
    if not lines.whole:
        return None
    pieces = [_piece(name.decode(), found) for name, found in lines.of_names.items()]
    known = [piece for piece in pieces if piece is not None]
    if len(known) < len(pieces):
        return None
    return Divided(
        shared=np.array(lines.shared, np.int64),
        template=hashlib.blake2b(without_groups(b"\n".join(lines.text)), digest_size=16).digest(),
        pieces=tuple(known),
    )


@dataclass
class _Line:
    """A record of a parameter, without its digest."""

    at: int
    own: bool
    head: bytes
    tail: bytes = b""


class _Lines:
    """The lines of a rank as they come."""

    def __init__(self, names: set[bytes], *, late: bool) -> None:
        self.shared: list[int] = []
        self.text: list[bytes] = []
        self.of_names: dict[bytes, list[_Line]] = {}
        self._names, self._late = names, late
        self._count, self._marked = 0, 0
        self._line: _Line | None = None
        self._own = False

    @property
    def whole(self) -> bool:
        """Whether a marker ended the last step."""
        return self._marked == self._count

    def begin(self, head: bytes) -> bool:
        """Take what is before a digest; False where that is no record, or not the next one."""
        if not head.startswith(RECORD):
            return False
        seq, _, rest = head[len(RECORD) :].partition(b",")
        if seq != b"%d" % self._count:
            return False
        found = _OF_PARAMETER.match(rest)
        self._line, self._own = None, False
        if found is not None and found[2] in self._names:
            self._own = _of_range(found[1], found[3], late=self._late)
            if self._own or found[3] == b"param":
                self._line = _Line(at=self._count, own=self._own, head=rest)
                self.of_names.setdefault(found[2], []).append(self._line)
        if not self._own:
            self.shared.append(self._count)
            self.text.append(rest)
        self._count += 1
        return True

    def end(self, tail: bytes) -> bool:
        """Take what is behind a digest."""
        if self._count == 0:
            return not tail
        if self._line is not None:
            self._line.tail = tail
        if not self._own:
            self.text.append(tail)
        return b'"kind"' not in tail

    def mark(self, line: bytes) -> bool:
        """Take a line that is none of a record; False for another than a marker that tells true."""
        found = _MARKER.match(line)
        if found is None or int(found[3]) != self._count - self._marked:
            return False
        self._marked = self._count
        self.text.append(found[1] + line[found.end() :])
        return True


def _of_range(phase: bytes, role: bytes, *, late: bool) -> bool:
    try:
        key = RecordKey(step=0, phase=Phase(phase.decode()), fqn="", role=Role(role.decode()))
    except ValueError:
        return False
    return is_divided(key, late=late)


def _piece(fqn: str, lines: Sequence[_Line]) -> Piece | None:
    told = [_told(line) for line in lines]
    if None in told:
        return None
    known = [one for one in told if one is not None]
    return Piece(
        fqn=fqn,
        at=np.array([line.at for line in lines], np.int64),
        own=np.array([line.own for line in lines], np.bool_),
        numels=np.array([numel for numel, _, _ in known], np.int64),
        template=_digest(text for _, text, _ in known),
        label=_digest(label for _, _, label in known),
    )


def _told(line: _Line) -> tuple[int, bytes, bytes] | None:
    """Return elements, text and label of a line; None where the range is not of so many elements."""
    shape = _SHAPE.search(line.head)
    if shape is None:
        return None
    sizes = [int(size) for size in shape[1].split(b",") if size]
    numel = int(np.prod(sizes, dtype=np.int64))
    ranges = [found for found in (_SLOT.search(line.head), _PART.search(line.tail)) if found is not None]
    if any(int(one[2]) - int(one[1]) != numel for one in ranges):
        return None
    if not line.own:
        return numel, line.head + without_groups(line.tail), b""
    few = b"%d" % numel if numel < 2 or len(sizes) != 1 else b"*"  # a single number is judged as one
    head = _OFFSET.sub(b"", _SLOT.sub(b'"slot":"*"', line.head))
    if len(sizes) == 1:
        head = _SHAPE.sub(b'"shape":[*]', head)
    label = b";".join((shape[0], *(found[0] for found in ranges)))
    return numel, few + head + _PART.sub(b'"part":null', line.tail), label


def _digest(texts: Iterable[bytes]) -> bytes:
    return hashlib.blake2b(b"\n".join(texts), digest_size=16).digest()
