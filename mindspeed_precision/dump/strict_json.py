"""JSON that is refused unless it is exactly what was meant."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mindspeed_precision.errors import DumpError

_LONGEST = 300
"""Characters of a file that an error repeats."""


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = dict(pairs)
    if len(plain) != len(pairs):
        raise ValueError("a key appears twice")
    return plain


_DECODER = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_unique)


def load_object(text: str | bytes, *, where: str) -> dict[str, Any]:
    """Read a JSON object strictly: no duplicate keys, no ``NaN``.

    Raises:
        DumpError: it is something else.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode(json.detect_encoding(text), "surrogatepass")
        plain = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise DumpError(f"not readable as JSON: {error}", where=where) from error
    if not isinstance(plain, dict):
        raise DumpError("not a JSON object", where=where, found=type(plain).__name__)
    return plain


def check_keys(plain: Any, keys: Mapping[str, tuple[type, ...]], *, where: str) -> None:
    """Refuse an object that does not have exactly ``keys``, each of one of its types.

    Raises:
        DumpError: a key is missing, unknown, or of another type.
    """
    if not isinstance(plain, dict):
        raise DumpError("not an object", where=where, found=type(plain).__name__, expected=", ".join(keys))
    if plain.keys() != keys.keys():
        odd = sorted(plain.keys() ^ keys.keys())
        what = "unknown" if odd[0] in plain else "missing"
        raise DumpError(
            f"{what} key {_short(repr(odd[0]))}",
            where=where,
            expected=", ".join(keys),
            found=_short(", ".join(plain)),
        )
    for name, types in keys.items():
        if type(plain[name]) not in types:
            names = " or ".join(t.__name__ for t in types)
            raise DumpError(
                f"ill-typed {name!r}", where=where, found=_short(repr(plain[name])), expected=names
            )


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
