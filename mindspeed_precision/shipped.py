"""Tables that come with the package, read without OmegaConf.

Asked value by value whether the tables of ``verify`` fit their schema, it takes longer than comparing two
steps. Here the types are looked at, and nothing is converted: what does not fit at once is for
``config.read_foreign``, which says why, or reads it otherwise. ``tests/config/test_shipped.py`` holds that
every file of the package is read alike by both.
"""

from __future__ import annotations

import typing
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import yaml


class _MisfitError(Exception):
    """A value is not at once of the type that the schema has."""


def read_shipped(path: Path, schema: type) -> dict[str, Any] | None:
    """Read a YAML file of the package into plain data, with the defaults of what it leaves out.

    Args:
        path: of the file.
        schema: a dataclass with the defaults of every key; its first is ``schema``, the version.

    Returns:
        What ``config.read_foreign`` returns; None: somebody has changed the file, and it does not fit.
    """
    try:
        plain = yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        filled = _filled(plain, schema)
    except (yaml.YAMLError, UnicodeError, _MisfitError):
        return None
    return filled if filled["schema"] == 1 else None


def _filled(given: Any, schema: type) -> dict[str, Any]:
    types = typing.get_type_hints(schema)
    if not isinstance(given, dict) or not given.keys() <= types.keys():
        raise _MisfitError
    return asdict(schema()) | {name: _value(value, types[name]) for name, value in given.items()}


def _value(value: Any, kind: Any) -> Any:
    if is_dataclass(kind) and isinstance(kind, type):
        return _filled(value, kind)
    origin, items = typing.get_origin(kind), typing.get_args(kind)
    if origin in (list, dict):
        if type(value) is not origin:
            raise _MisfitError
        if origin is list:
            return [_value(each, items[0]) for each in value]
        return {_value(name, items[0]): _value(each, items[1]) for name, each in value.items()}
    if type(value) is int and kind is float:
        return float(value)
    if kind is not Any and type(value) not in (items or (kind,)):
        raise _MisfitError
    return value
