"""The lines of ``index.jsonl`` and the names of a run's files: schema 4, as ``docs/dump-format.md`` says.

One place knows both directions: what ``to_json`` writes, ``parse_line`` reads back equal, and a line with a
missing, unknown or ill-typed key is refused with its file and number. Schemas 1, without sketches, 2, without
placements, and 3, without those of activations and with another definition of fingerprint and sketch, are
read.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

from mindspeed_precision.dump.encode import RecordLine
from mindspeed_precision.dump.strict_json import check_keys, load_object
from mindspeed_precision.errors import DumpError
from mindspeed_precision.record import fingerprint as fingerprint_definition
from mindspeed_precision.record.sketch import ALGORITHM as SKETCH
from mindspeed_precision.record.sketch import BUCKETS, BYTES, unpack
from mindspeed_precision.records import (
    INIT_STEP,
    NO_MICROBATCH,
    Digest,
    Layout,
    ParameterDeclaration,
    Phase,
    Place,
    Placement,
    RankCoordinates,
    RecordKey,
    Role,
    Sketch,
    Split,
    Statistics,
    TensorRecord,
    Unplaced,
)

SCHEMA = 4
"""Version of the files of a run that is written."""

READABLE = (1, 2, 3, 4)
"""Versions that are read; a reader refuses any other."""

FINGERPRINT = fingerprint_definition.ALGORITHM
"""Definition of the fingerprints in a run."""

FINGERPRINT_OF_OLDER = "splitmix64-positional-1"
"""Definition of the fingerprints in a run of schemas 1 to 3."""

SKETCH_OF_OLDER = "count-sketch-256-1"
"""Definition of the sketches in a run of schemas 2 and 3."""

MANIFEST = "run.json"
INDEX = "index.jsonl"
COMPLETE = "COMPLETE"
FINDINGS = "findings.json"
EFFECTIVE = "effective.json"

KEYS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "header": {"schema": (int,), "fingerprint": (str,), "sketch": (str,), "coordinates": (dict,)},
    "parameters": {"parameters": (list,)},
    "placement": {"number": (int,), "place": (dict, type(None)), "reason": (str,)},
    "record": {
        "seq": (int,),
        "step": (int,),
        "microbatch": (int,),
        "phase": (str,),
        "fqn": (str,),
        "role": (str,),
        "slot": (str,),
        "occurrence": (int,),
        "recomputed": (bool,),
        "shape": (list,),
        "dtype": (str,),
        "layout": (dict, type(None)),
        "fingerprint": (str,),
        "unordered": (str,),
        "statistics": (dict, type(None)),
        "sketch": (dict, type(None)),
        "payload": (str, type(None)),
        "note": (str,),
        "part": (list, type(None)),
        "placement": (int, type(None)),
    },
    "problem": {"step": (int,), "record": (str,), "reason": (str,)},
    "step": {
        "step": (int,),
        "records": (int,),
        "payloads": (int,),
        "problems": (int,),
        "microbatches": (int,),
    },
}
"""Keys of each kind of line, beside ``kind``, with the JSON types they may hold."""

SINCE: Mapping[int, Mapping[str, tuple[str, ...]]] = {
    2: {"header": ("sketch",), "record": ("sketch",)},
    3: {"record": ("part",), "parameter": ("placement",)},
    4: {"record": ("placement",)},
}
"""By schema, the keys that it added to a kind of line, or to a parameter."""

_PLACES_SINCE = 4
"""Schema that declares places, and of which a placement has several splits."""

LAYOUT_KEYS: Mapping[str, tuple[type, ...]] = {
    "stride": (list,),
    "storage_offset": (int,),
    "contiguous": (bool,),
    "format": (str,),
}
STATISTICS_KEYS: Mapping[str, tuple[type, ...]] = {
    "minimum": (float, int, str),
    "maximum": (float, int, str),
    "mean": (float, int, str),
    "l2_norm": (float, int, str),
    "zeros": (int,),
    "nans": (int,),
    "infs": (int,),
    "exponents": (dict,),
}
SKETCH_KEYS: Mapping[str, tuple[type, ...]] = {"values": (str,), "roundoff": (float, int)}
PARAMETER_KEYS: Mapping[str, tuple[type, ...]] = {
    "fqn": (str,),
    "shape": (list,),
    "dtype": (str,),
    "trainable": (bool,),
    "tied_to": (str,),
    "placement": (dict, type(None)),
}
PLACEMENT_KEYS: Mapping[str, tuple[type, ...]] = {
    "shape": (list,),
    "splits": (list,),
    "partial": (str,),
    "copy_of": (str,),
}
SPLIT_KEYS: Mapping[str, tuple[type, ...]] = {"dim": (int,), "blocks": (list,)}
COORDINATE_KEYS: Mapping[str, tuple[type, ...]] = {field.name: (int,) for field in fields(RankCoordinates)}
COMPLETE_KEYS: Mapping[str, tuple[type, ...]] = {
    "schema": (int,),
    "lines": (int,),
    "algorithm": (str,),
    "digest": (str,),
}
EFFECTIVE_KEYS: Mapping[str, tuple[type, ...]] = {
    "schema": (int,),
    "groups": (list,),
    "tied": (dict,),
    "modules": (list,),
}
GROUP_KEYS: Mapping[str, tuple[type, ...]] = {"optimizer": (str,), "settings": (dict,), "parameters": (list,)}
MEMBER_KEYS: Mapping[str, tuple[type, ...]] = {
    "fqn": (str,),
    "dtype": (str,),
    "copy": (bool,),
    "range": (list, type(None)),
}
MODULE_KEYS: Mapping[str, tuple[type, ...]] = {"fqn": (str,), "class": (str,), "values": (dict,)}
FINDINGS_KEYS: Mapping[str, tuple[type, ...]] = {"schema": (int,), "findings": (list,)}
DIGEST_ALGORITHM = "blake2b-16"


@dataclass(frozen=True, kw_only=True)
class Header:
    """First line of an index: who wrote it, and by which definitions.

    Attributes:
        coordinates: where the rank sits.
        schema: version of the lines that follow.
        fingerprint: definition of the fingerprints.
    """

    coordinates: RankCoordinates
    schema: int = SCHEMA
    fingerprint: str = FINGERPRINT


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """The parameters that a rank holds."""

    parameters: tuple[ParameterDeclaration, ...]


@dataclass(frozen=True, kw_only=True)
class PlaceDeclaration:
    """Where activations sit, declared once: records name it by its number.

    Attributes:
        number: of the declaration on this rank, from 0.
        place: where; or why that is not known.
    """

    number: int
    place: Place


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A record that could not be taken, or a loss of several.

    Attributes:
        step: step in which it happened.
        record: the record, as a phrase; empty where it is not one.
        reason: why, in one line.
    """

    step: int
    record: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class StepMarker:
    """Last line of a step. The lines since the marker before it are whole.

    Attributes:
        step: the step.
        records: record lines of the step.
        payloads: how many of them have a payload.
        problems: problem lines of the step.
        microbatches: microbatches that the step ran.
    """

    step: int
    records: int
    payloads: int
    problems: int
    microbatches: int


LONGEST_LINE = 64 << 20
"""Bytes of a line, of which a hostile one takes 27 times as much memory. 200 000 parameters take less."""

_BINS = {str(number): number for number in range(256)}
_DIGITS = re.compile("[0-9a-f]{16}")
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))

Line = Header | Parameters | PlaceDeclaration | TensorRecord | Problem | StepMarker


def rank_directory(rank: int) -> str:
    """Return the name of a rank's directory."""
    return f"rank{rank:05d}"


def payload_file(step: int, microbatch: int, repeat: int = 0) -> str:
    """Return the name of a payload file; ``repeat`` counts the runs of one step before this one."""
    name = "init" if step == INIT_STEP else f"step{step:06d}"
    if microbatch != NO_MICROBATCH:
        name += f".mb{microbatch:03d}"
    return f"{name}.r{repeat}.safetensors" if repeat else f"{name}.safetensors"


def to_json(line: Line, *, place: int | None = None) -> str:
    """Return ``line`` as one line of JSON, without its newline.

    Args:
        line: the line.
        place: of a record that has a place, the number under which that was declared.
    """
    if isinstance(line, TensorRecord):
        return RecordLine.of(line).text(line.payload, place)
    if isinstance(line, Header):
        plain: dict[str, Any] = {"kind": "header", "schema": SCHEMA}
        plain.update(fingerprint=FINGERPRINT, sketch=SKETCH, coordinates=asdict(line.coordinates))
    elif isinstance(line, Parameters):
        plain = {"kind": "parameters", "parameters": [asdict(parameter) for parameter in line.parameters]}
    elif isinstance(line, PlaceDeclaration):
        known = isinstance(line.place, Placement)
        plain = {"kind": "placement", "number": line.number, "place": asdict(line.place) if known else None}
        plain["reason"] = "" if isinstance(line.place, Placement) else line.place.reason
    else:
        plain = {"kind": "problem" if isinstance(line, Problem) else "step", **asdict(line)}
    return _ENCODER.encode(plain)


def parse_line(text: str | bytes, *, where: str, schema: int = SCHEMA, places: Sequence[Place] = ()) -> Line:
    """Read one line of an index.

    Args:
        text: the line, with or without its newline.
        where: file and line number, for errors.
        schema: of the file, as its header says; the header itself says its own.
        places: the places that the lines before declared, by number.

    Raises:
        DumpError: it is too long, no JSON object, of no known kind, or one of its values does not fit.
    """
    if len(text) > LONGEST_LINE:
        found, expected = f"{len(text)} bytes", f"{LONGEST_LINE} at most"
        raise DumpError("no line of an index is so long", where=where, found=found, expected=expected)
    plain = load_object(text, where=where)
    kind = plain.pop("kind", None)
    if not isinstance(kind, str) or kind not in KEYS or (kind == "placement" and schema < _PLACES_SINCE):
        known = [name for name in KEYS if name != "placement" or schema >= _PLACES_SINCE]
        raise DumpError(
            "no such kind of line", where=where, found=repr(kind), expected=f"one of {', '.join(known)}"
        )
    if kind == "header" and plain.get("schema") in READABLE:
        schema = plain["schema"]
    check_keys(plain, _keys(kind, schema), where=where)
    if kind == "record":
        return _record_from_plain(plain, where, places)
    if kind == "placement":
        return _place_declaration(plain, where)
    if kind == "header":
        return _header_from_plain(plain, where)
    if kind == "parameters":
        return Parameters(parameters=tuple(_parameter(entry, where, schema) for entry in plain["parameters"]))
    return Problem(**plain) if kind == "problem" else StepMarker(**plain)


@cache
def _keys(kind: str, schema: int) -> dict[str, tuple[type, ...]]:
    """Return the keys that a kind of line, or a parameter, has in a schema."""
    keys = PARAMETER_KEYS if kind == "parameter" else KEYS[kind]
    later = {name for since, added in SINCE.items() if since > schema for name in added.get(kind, ())}
    return {name: types for name, types in keys.items() if name not in later}


def parse_statistics(text: bytes, *, where: str) -> Statistics | None:
    """Read the statistics of a record by themselves; ``null`` is None.

    Raises:
        DumpError: they are none.
    """
    return None if text == b"null" else _statistics(load_object(text, where=where), where)


def _header_from_plain(plain: dict[str, Any], where: str) -> Header:
    older = plain["schema"] in READABLE and plain["schema"] < SCHEMA
    readable = {
        "schema": READABLE,
        "fingerprint": (FINGERPRINT_OF_OLDER if older else FINGERPRINT,),
        "sketch": (SKETCH_OF_OLDER if older else SKETCH,),
    }
    for name, ours in readable.items():
        if name in plain and plain[name] not in ours:
            expected = " or ".join(map(str, ours))
            raise DumpError(
                f"written with another {name}", where=where, found=str(plain[name]), expected=expected
            )
    check_keys(plain["coordinates"], COORDINATE_KEYS, where=where)
    coordinates = RankCoordinates(**plain["coordinates"])
    return Header(coordinates=coordinates, schema=plain["schema"], fingerprint=plain["fingerprint"])


def _parameter(plain: Any, where: str, schema: int) -> ParameterDeclaration:
    check_keys(plain, _keys("parameter", schema), where=where)
    shape, placement = _integers(plain["shape"], where), plain.get("placement")
    if placement is not None and schema < _PLACES_SINCE:
        placement = _with_splits(placement, where)
    placed = None if placement is None else _placement(placement, shape, where)
    return ParameterDeclaration(**{**plain, "shape": shape, "placement": placed})


def _with_splits(plain: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a placement of schema 3, which has one split, as one of today."""
    older = {**PLACEMENT_KEYS, **SPLIT_KEYS}
    del older["splits"]
    check_keys(plain, older, where=where)
    rest = {name: value for name, value in plain.items() if name not in SPLIT_KEYS}
    split = {name: plain[name] for name in SPLIT_KEYS}
    return {**rest, "splits": [split] if plain["blocks"] else []}


def _place_declaration(plain: dict[str, Any], where: str) -> PlaceDeclaration:
    number, place, reason = plain["number"], plain["place"], plain["reason"]
    if (place is None) != bool(reason):
        raise DumpError("a placement is known, or there is a reason", where=where, found=f"{reason!r}")
    found: Place = Unplaced(reason=reason) if place is None else _placement(place, None, where)
    return PlaceDeclaration(number=number, place=found)


def _placement(plain: dict[str, Any], local: tuple[int, ...] | None, where: str) -> Placement:
    """Read a placement; ``local``: the shape of what the rank holds, where it is known."""
    check_keys(plain, PLACEMENT_KEYS, where=where)
    shape = _integers(plain["shape"], where)
    splits = tuple(_split(split, shape, where) for split in plain["splits"])
    placement = Placement(**{**plain, "shape": shape, "splits": splits})
    ascending = all(one.dim < two.dim for one, two in pairwise(splits))
    if not ascending or (local is not None and placement.local_shape != local):
        made = list(placement.local_shape) if ascending else "dimensions that do not ascend"
        wanted = "ascending dimensions" if local is None else f"blocks that make {list(local)}"
        raise DumpError("no placement of this tensor", where=where, found=str(made), expected=wanted)
    return placement


def _split(plain: Any, shape: tuple[int, ...], where: str) -> Split:
    check_keys(plain, SPLIT_KEYS, where=where)
    dim = plain["dim"]
    blocks = tuple(_integers(block, where) for block in plain["blocks"] if isinstance(block, list))
    size = shape[dim] if 0 <= dim < len(shape) else 0
    inside = all(len(b) == 2 and b[0] >= 0 and b[1] > 0 and sum(b) <= size for b in blocks)
    inside &= all(sum(one) <= two[0] for one, two in pairwise(sorted(blocks)))
    if not blocks or len(blocks) != len(plain["blocks"]) or not inside:
        found, expected = (
            f"{plain['blocks']} of {list(shape)} along {dim}",
            "disjoint blocks of one dimension",
        )
        raise DumpError("no split of this tensor", where=where, found=found, expected=expected)
    return Split(dim=dim, blocks=tuple((block[0], block[1]) for block in blocks))


def _record_from_plain(plain: dict[str, Any], where: str, places: Sequence[Place]) -> TensorRecord:
    try:
        phase, role = Phase(plain["phase"]), Role(plain["role"])
    except ValueError as error:
        raise DumpError(str(error), where=where) from error
    key = RecordKey(
        step=plain["step"],
        microbatch=plain["microbatch"],
        phase=phase,
        fqn=plain["fqn"],
        role=role,
        slot=plain["slot"],
        occurrence=plain["occurrence"],
        recomputed=plain["recomputed"],
    )
    digest = Digest(
        fingerprint=_hexadecimal(plain["fingerprint"], where),
        unordered=_hexadecimal(plain["unordered"], where),
        statistics=None if plain["statistics"] is None else _statistics(plain["statistics"], where),
        sketch=None if plain.get("sketch") is None else _sketch(plain["sketch"], where),
    )
    return TensorRecord(
        seq=plain["seq"],
        key=key,
        shape=_integers(plain["shape"], where),
        dtype=plain["dtype"],
        layout=None if plain["layout"] is None else _layout(plain["layout"], where),
        digest=digest,
        payload=plain["payload"],
        note=plain["note"],
        part=None if plain.get("part") is None else _part(plain["part"], where),
        place=_place_of(plain, where, places),
    )


def _place_of(plain: dict[str, Any], where: str, places: Sequence[Place]) -> Place | None:
    number = plain.get("placement")
    if number is None:
        return None
    if not 0 <= number < len(places):
        expected = f"one of the {len(places)} that were declared before"
        raise DumpError("no such placement", where=where, found=str(number), expected=expected)
    place: Place = places[number]
    shape = plain["shape"]
    if isinstance(place, Placement) and place.local_numel != math.prod(_integers(shape, where)):
        expected = f"the elements of {list(place.local_shape)}"
        raise DumpError("not the placement of this tensor", where=where, found=str(shape), expected=expected)
    return place


def _part(values: list[Any], where: str) -> tuple[int, int]:
    part = _integers(values, where)
    if len(part) != 2 or not 0 <= part[0] <= part[1]:
        raise DumpError("no range of elements", where=where, found=repr(values), expected="[start, stop]")
    return part[0], part[1]


def _layout(plain: dict[str, Any], where: str) -> Layout:
    check_keys(plain, LAYOUT_KEYS, where=where)
    stride = _integers(plain["stride"], where)
    return _layout_of(stride, plain["storage_offset"], plain["contiguous"], plain["format"])


@lru_cache(maxsize=4096)
def _layout_of(stride: tuple[int, ...], storage_offset: int, contiguous: bool, format_: str) -> Layout:
    return Layout(stride=stride, storage_offset=storage_offset, contiguous=contiguous, format=format_)


def _statistics(plain: dict[str, Any], where: str) -> Statistics:
    check_keys(plain, STATISTICS_KEYS, where=where)
    counts = plain["exponents"]
    if not (counts.keys() <= _BINS.keys() and set(map(type, counts.values())) <= {int}):
        found = next(f"{n!r}: {c!r}" for n, c in counts.items() if n not in _BINS or type(c) is not int)
        raise DumpError("no bin of an exponent histogram", where=where, found=found)
    return Statistics(
        minimum=_number(plain["minimum"], where),
        maximum=_number(plain["maximum"], where),
        mean=_number(plain["mean"], where),
        l2_norm=_number(plain["l2_norm"], where),
        zeros=plain["zeros"],
        nans=plain["nans"],
        infs=plain["infs"],
        exponents={_BINS[name]: count for name, count in counts.items()},
    )


def _sketch(plain: dict[str, Any], where: str) -> Sketch:
    check_keys(plain, SKETCH_KEYS, where=where)
    text, roundoff = plain["values"], plain["roundoff"]
    characters = -(-BUCKETS * BYTES // 3) * 4
    if len(text) != characters:  # before anything of that size is made
        found, expected = f"{len(text)} characters", f"{characters}: {BUCKETS} numbers of {BYTES} bytes"
        raise DumpError("no sketch", where=where, found=found, expected=expected)
    if not 0 < roundoff < 1:
        found, expected = f"roundoff {str(roundoff)[:40]}", "a relative error between 0 and 1"
        raise DumpError("no sketch", where=where, found=found, expected=expected)
    try:
        sketch = Sketch(data=base64.b64decode(text, validate=True), roundoff=float(roundoff))
    except ValueError as error:
        raise DumpError("no sketch", where=where, found=str(error), expected="base64") from error
    if len(sketch.data) != BUCKETS * BYTES or not all(map(math.isfinite, unpack(sketch).tolist())):
        raise DumpError("no sketch", where=where, expected=f"{BUCKETS} finite numbers of {BYTES} bytes")
    return sketch


def _number(value: float | str, where: str) -> float:
    if type(value) is float:
        return value
    if isinstance(value, str) and value not in ("nan", "inf", "-inf"):
        raise DumpError(
            "not a number", where=where, found=repr(value), expected='a number, "nan", "inf" or "-inf"'
        )
    return float(value)


def _hexadecimal(text: str, where: str) -> int:
    if _DIGITS.fullmatch(text) is None:
        raise DumpError("no fingerprint", where=where, found=repr(text), expected="16 hexadecimal digits")
    return int(text, 16)


def _integers(values: list[Any], where: str) -> tuple[int, ...]:
    if not set(map(type, values)) <= {int}:
        raise DumpError("not a list of integers", where=where, found=repr(values))
    return tuple(values)
