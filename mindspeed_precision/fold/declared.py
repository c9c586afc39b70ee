"""What a rank declares beside its records, so that two that declare alike can be told from others."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from mindspeed_precision.dump.effective import check_effective
from mindspeed_precision.dump.format import EFFECTIVE, Parameters, PlaceDeclaration, parse_line
from mindspeed_precision.dump.inside import read_inside
from mindspeed_precision.dump.strict_json import load_object
from mindspeed_precision.fold.rank_lines import RankLines
from mindspeed_precision.records import Placement


def effective_of(directory: Path, *, divided: bool) -> bytes:
    """Return what the rank's objects held, as a digest: without what its ranges are where it has some."""
    path = directory / EFFECTIVE
    if not path.exists():
        return b""
    data = read_inside(path, directory.parent)
    _check_effective(data, str(path))
    if divided:
        data = _without_ranges(data)
    return hashlib.blake2b(data, digest_size=16).digest()


@lru_cache(maxsize=64)
def _without_ranges(data: bytes) -> bytes:
    plain = load_object(data, where=EFFECTIVE)
    groups = [(group["optimizer"], group["settings"]) for group in plain["groups"]]
    return repr((groups, plain["tied"], plain["modules"])).encode()


_SOUND: set[bytes] = set()


def _check_effective(data: bytes, where: str) -> None:
    """Refuse what no recorder writes; the same bytes once."""
    name = hashlib.blake2b(data, digest_size=16).digest()
    if name not in _SOUND:
        check_effective(load_object(data, where=where), where=where)
        _SOUND.add(name)


def declared_by(one: RankLines, two: RankLines) -> bytes:
    """Return what both sides declare, without which elements a rank holds, and where they declare alike."""
    told = [_declared(one.declared), _declared(two.declared), _places(one.places), _places(two.places)]
    same = one.declared == two.declared, one.places == two.places
    alike = repr(same)
    if not all(same):  # ranks that part here stand for themselves by their own bytes
        alike += repr((one.declared, two.declared, one.places, two.places))
    sizes = repr([(c.sizes(), c.pp_rank) for c in (one.coordinates, two.coordinates)])
    return b"\n".join([*told, alike.encode(), sizes.encode()])


@lru_cache(maxsize=1024)
def _declared(lines: tuple[bytes, ...]) -> bytes:
    told = []
    for text in lines:
        line = parse_line(text, where="parameters")
        assert isinstance(line, Parameters)
        told += [
            (p.fqn, p.shape, p.dtype, p.trainable, p.tied_to, _kind(p.placement)) for p in line.parameters
        ]
    return repr(told).encode()


@lru_cache(maxsize=1024)
def _places(lines: tuple[bytes, ...]) -> bytes:
    told = []
    for text in lines:
        line = parse_line(text, where="placement")
        assert isinstance(line, PlaceDeclaration)
        place = line.place
        told.append((line.number, _kind(place) if isinstance(place, Placement) else place.reason))
    return repr(told).encode()


def _kind(place: Placement | None) -> object:
    """Return all of a placement but for which elements of a split dimension the rank holds."""
    if place is None:
        return None
    dims = [split.dim for split in place.splits]
    return place.shape, place.local_shape, dims, place.whole, place.partial, place.copy_of
