"""What a rank's ``effective.json`` may hold: every entry is looked at before anybody reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_precision.dump.format import (
    EFFECTIVE_KEYS,
    GROUP_KEYS,
    MEMBER_KEYS,
    MODULE_KEYS,
    READABLE,
)
from mindspeed_precision.dump.strict_json import check_keys
from mindspeed_precision.errors import DumpError

_LARGEST = 1 << 63


def check_effective(plain: Mapping[str, Any], *, where: str) -> None:
    """Refuse what no recorder writes.

    Raises:
        DumpError: a key is missing, unknown or of another type, or a number is none.
    """
    check_keys(plain, EFFECTIVE_KEYS, where=where)
    if plain["schema"] not in READABLE:
        raise DumpError("another schema", where=where, found=repr(plain["schema"]))
    for group in plain["groups"]:
        check_keys(group, GROUP_KEYS, where=where)
        _scalars(group["settings"], where)
        for member in group["parameters"]:
            check_keys(member, MEMBER_KEYS, where=where)
            span = member["range"]
            if span is not None and not (len(span) == 2 and all(type(value) is int for value in span)):
                raise DumpError("no range", where=where, found=repr(span), expected="[start, stop]")
    for module in plain["modules"]:
        check_keys(module, MODULE_KEYS, where=where)
        _scalars(module["values"], where)
    if not all(isinstance(name, str) for name in plain["tied"].values()):
        raise DumpError("no name of a parameter", where=where, found=repr(plain["tied"]))


def _scalars(values: Mapping[str, Any], where: str) -> None:
    for name, value in values.items():
        number = type(value) is int and abs(value) < _LARGEST
        if value is not None and not number and not isinstance(value, (bool, float, str)):
            raise DumpError(f"no plain value of {name!r}", where=where, found=repr(value)[:80])
