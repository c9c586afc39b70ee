"""Requested against effective: what Megatron copies from its arguments into its configuration objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from mindspeed_precision.config import data_directory, read_document
from mindspeed_precision.verify.settings import normal

OBJECTS = ("transformer_config", "ddp_config", "optimizer_config")

_OWN_MODEL = ("hidden_size", "num_layers")
"""Where these are others, the model was not built from the arguments: a vision tower beside a decoder."""


@dataclass
class _Schema:
    schema: int = 1
    transformer_config: str = ""
    ddp_config: str = ""
    optimizer_config: str = ""
    if_asked_for: str = ""


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One argument and where it is copied to.

    Attributes:
        argument: Megatron's.
        section: the configuration object.
        field: its field.
        if_asked_for: something else may turn the field on.
    """

    argument: str
    section: str
    field: str
    if_asked_for: bool = False


@dataclass(frozen=True, kw_only=True)
class Lost:
    """An argument that has another value where it is used.

    Attributes:
        copy: which, and where.
        requested: the argument's value.
        effective: the field's.
    """

    copy: Copy
    requested: Any
    effective: Any

    @property
    def line(self) -> str:
        """It as one line of evidence."""
        place = f"{self.copy.section}.{self.copy.field}"
        return f"{self.copy.argument}={self.requested} was asked for, {place} is {self.effective}"


@cache
def copies() -> tuple[Copy, ...]:
    """Return the table that is shipped.

    Raises:
        ConfigError: it does not fit its schema.
    """
    path = data_directory("configs") / "meanings" / "forwarded.yaml"
    plain = read_document(path, _Schema, kind="table of copies", remedy="see docs/verify.md")
    found = [_copy(text, section) for section in OBJECTS for text in plain[section].split()]
    only = [_copy(text, OBJECTS[0], if_asked_for=True) for text in plain["if_asked_for"].split()]
    return (*found, *only)


def _copy(text: str, section: str, *, if_asked_for: bool = False) -> Copy:
    argument, _, field = text.partition("=")
    return Copy(argument=argument, section=section, field=field or argument, if_asked_for=if_asked_for)


def lost_arguments(config: Mapping[str, Mapping[str, Any]]) -> tuple[int, list[Lost], str]:
    """Return how many copies a run has, those that are other than what was asked for, and what was left out.

    Args:
        config: what ``run.json`` says under ``config``.
    """
    arguments = config.get("megatron_args") or {}
    model = config.get("transformer_config") or {}
    own = [
        name
        for name in _OWN_MODEL
        if name in arguments and name in model and normal(arguments[name]) != normal(model[name])
    ]
    looked, found = 0, []
    for copy in copies():
        section = config.get(copy.section) or {}
        if copy.argument not in arguments or copy.field not in section:
            continue
        if own and copy.section == OBJECTS[0]:
            continue
        looked += 1
        requested, effective = arguments[copy.argument], section[copy.field]
        if not _alike(requested, effective) and (requested or not copy.if_asked_for):
            found.append(Lost(copy=copy, requested=requested, effective=effective))
    skipped = f"the model has another {' and '.join(own)} than the arguments" if own else ""
    return looked, found, skipped


def _alike(requested: Any, effective: Any) -> bool:
    one, two = normal(requested), normal(effective)
    if isinstance(one, list) and len(one) == 1:
        one = one[0]
    if isinstance(two, list) and len(two) == 1:
        two = two[0]
    return bool(one == two) or (not one and not two and one is not two and None in (one, two))
