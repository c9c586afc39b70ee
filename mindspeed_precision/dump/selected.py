"""Some kinds of one rank's records, in as much memory as these need."""

from __future__ import annotations

import re
from pathlib import Path

from mindspeed_precision.dump.collection import no_collection
from mindspeed_precision.dump.format import (
    COMPLETE,
    FINGERPRINT,
    INDEX,
    SCHEMA,
    Header,
    Parameters,
    PlaceDeclaration,
    StepMarker,
    parse_line,
)
from mindspeed_precision.dump.inside import read_inside, require_inside
from mindspeed_precision.dump.reader import RankRecords, check_seal
from mindspeed_precision.records import (
    ParameterDeclaration,
    Phase,
    Place,
    RankCoordinates,
    Role,
    TensorRecord,
)

_RECORD = b'{"kind":"record"'
_KIND = re.compile(rb'"phase":"([a-z_]+)".*?"role":"([a-z_]+)"')


def load_selected(directory: Path, kinds: frozenset[tuple[Phase, Role]]) -> RankRecords | None:
    """Read one rank's records of some kinds, of whole steps; the seal is checked, other lines are not read.

    Args:
        directory: of a rank that the strict reader has read before.
        kinds: which records.

    Returns:
        The rank without what its objects held and what it found; None if it holds no whole line.

    Raises:
        DumpError: a file of it is not what was written.
    """
    require_inside(directory, directory.parent)
    if not (directory / INDEX).is_file():
        return None
    data = read_inside(directory / INDEX, directory.parent)
    lines = data.split(b"\n")
    lines.pop()
    complete = check_seal(directory / COMPLETE, data, len(lines))
    del data
    index = _Selection(path=directory / INDEX, kinds=kinds)
    with no_collection():
        for number, text in enumerate(lines, start=1):
            index.add(text, number)
    if index.coordinates is None:
        return None
    return RankRecords(
        directory=directory,
        coordinates=index.coordinates,
        records=tuple(index.records),
        steps=tuple(index.microbatches),
        parameters=tuple(index.parameters),
        microbatches=index.microbatches,
        complete=complete,
        fingerprint=index.fingerprint,
    )


class _Selection:
    """What was read so far; ``pending`` holds the records since the last step marker."""

    def __init__(self, *, path: Path, kinds: frozenset[tuple[Phase, Role]]) -> None:
        self._path = path
        self._kinds = frozenset((phase.value.encode(), role.value.encode()) for phase, role in kinds)
        self._schema = SCHEMA
        self.fingerprint = FINGERPRINT
        self._places: list[Place] = []
        self._pending: list[TensorRecord] = []
        self.coordinates: RankCoordinates | None = None
        self.parameters: list[ParameterDeclaration] = []
        self.records: list[TensorRecord] = []
        self.microbatches: dict[int, int] = {}

    def add(self, text: bytes, number: int) -> None:
        """Take a line, unless it is of a record of another kind."""
        if text.startswith(_RECORD) and not self._wanted(text):
            return
        where = f"{self._path}:{number}"
        line = parse_line(text, where=where, schema=self._schema, places=self._places)
        if isinstance(line, Header):
            self.coordinates, self._schema = line.coordinates, line.schema
            self.fingerprint = line.fingerprint
        elif isinstance(line, Parameters):
            self.parameters += line.parameters
        elif isinstance(line, PlaceDeclaration):
            self._places.append(line.place)
        elif isinstance(line, StepMarker):
            self.microbatches[line.step] = line.microbatches
            self.records += self._pending
            self._pending = []
        elif isinstance(line, TensorRecord):
            self._pending.append(line)

    def _wanted(self, text: bytes) -> bool:
        found = _KIND.search(text)
        return found is None or found.groups() in self._kinds
