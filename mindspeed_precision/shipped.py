"""Tables that come with the package, read as what their tests have found them to be.

``config.read_document`` asks OmegaConf whether a file fits its schema, value by value; for the tables of
``verify`` alone that takes longer than comparing two steps. A file of the package is asked once, by
``tests/config/test_shipped.py``.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import yaml


def read_shipped(path: Path, schema: type) -> dict[str, Any]:
    """Read a YAML file of the package into plain data, with the defaults of what it leaves out.

    Args:
        path: of a file that fits the schema.
        schema: a dataclass with the defaults of every key.

    Returns:
        What ``config.read_document`` returns.
    """
    plain = yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return _filled(plain, schema)


def _filled(given: Mapping[str, Any], schema: type) -> dict[str, Any]:
    types = typing.get_type_hints(schema)
    return asdict(schema()) | {name: _value(value, types[name]) for name, value in given.items()}


def _value(value: Any, kind: Any) -> Any:
    if is_dataclass(kind) and isinstance(kind, type):
        return _filled(value, kind)
    item = typing.get_args(kind)[-1] if isinstance(value, list | dict) and typing.get_args(kind) else None
    if isinstance(value, list):
        return [_value(each, item) for each in value]
    if isinstance(value, dict):
        return {name: _value(each, item) for name, each in value.items()}
    return float(value) if kind is float else value
