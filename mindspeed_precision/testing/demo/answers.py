"""Holds an answer of the tool against the documented one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def differences(expected: Any, found: Any, place: str = "") -> list[str]:
    """Return where ``found`` is not as documented; nothing where it is.

    A mapping is compared by the keys that are documented. Of a list each documented item must be there, in
    this order, and others may be between and behind them; a documented empty list must be empty. Anything
    else must be equal.

    Args:
        expected: what is documented: a part of the JSON.
        found: the JSON.
        place: where in it this is.
    """
    if isinstance(expected, Mapping):
        if not isinstance(found, Mapping):
            return [_line(place, expected, found)]
        return [
            line
            for key, value in expected.items()
            for line in differences(value, found.get(key), f"{place}.{key}")
        ]
    if isinstance(expected, Sequence) and not isinstance(expected, str):
        if not isinstance(found, Sequence) or isinstance(found, str) or bool(expected) > bool(found):
            return [_line(place, expected, found)]
        return _missing(expected, found, place) if expected else [_line(place, [], found)] if found else []
    return [] if expected == found else [_line(place, expected, found)]


def _missing(expected: Sequence[Any], found: Sequence[Any], place: str) -> list[str]:
    """Return the first documented item that is not there; why, where one item is left to blame."""
    left = list(found)
    for number, item in enumerate(expected):
        while left and differences(item, left[0]):
            left.pop(0)
        if not left:
            why = differences(item, found[number], f"{place}[{number}]") if number < len(found) else []
            return [
                f"{place.lstrip('.') or 'answer'} has no {item!r}" + (f" ({'; '.join(why)})" if why else "")
            ]
        left.pop(0)
    return []


def _line(place: str, expected: Any, found: Any) -> str:
    return f"{place.lstrip('.') or 'answer'} is {found!r}, documented is {expected!r}"
