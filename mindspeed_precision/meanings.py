"""What arguments, environment variables and versions mean for numerics: the tables of ``configs/meanings``.

``compare`` and ``verify`` read the same tables, so that they do not disagree. A name that is in no table has
no meaning here, and whoever asks must say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from mindspeed_precision.config import data_directory, read_document
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.records import Severity

JUDGES = ("", "schedule", "data", "weights", "layout")


_FRAMEWORKS = frozenset({"torch", "mindtorch", "mindspore", "msadapter"})


def without_framework(text: str) -> str:
    """Return a type or a function without the modules that have it: ``gelu`` of ``torch._C._nn.gelu``."""
    return text.rpartition(".")[2] if text.partition(".")[0] in _FRAMEWORKS else text


class Effect(str, Enum):
    """What a difference does to the numbers of two otherwise equal runs."""

    CHANGES = "changes"
    MAY = "may"
    CANNOT = "cannot"

    @property
    def severity(self) -> Severity:
        """How bad a difference is: an error, a warning, or information."""
        return _SEVERITIES[self.value]


_SEVERITIES = {"changes": Severity.ERROR, "may": Severity.WARNING, "cannot": Severity.INFO}


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What one name means.

    Attributes:
        effect: what a difference does.
        reason: why, in one line.
        judged_by: what shows it better than the option does (``schedule``, ``data``, ``weights``,
            ``layout``); empty: nothing.
    """

    effect: Effect
    reason: str
    judged_by: str = ""


@dataclass(frozen=True, kw_only=True)
class Meanings:
    """The tables.

    Attributes:
        arguments: of Megatron's arguments and the fields of its configuration objects, by name.
        variables: of environment variables, ``(shell pattern, meaning)``; the first that fits counts.
        versions: of packages, CANN and driver, by name.
    """

    arguments: Mapping[str, Meaning]
    variables: tuple[tuple[str, Meaning], ...]
    versions: Mapping[str, Meaning]

    def argument(self, name: str) -> Meaning | None:
        """Return what an argument means; None: it is in no table."""
        return self.arguments.get(name)

    def variable(self, name: str) -> Meaning | None:
        """Return what an environment variable means; None: no pattern fits."""
        return next((meaning for pattern, meaning in self.variables if fnmatchcase(name, pattern)), None)

    def version(self, name: str) -> Meaning | None:
        """Return what another version of a package means; None: it is in no table."""
        return self.versions.get(name)


@dataclass
class _Group:  # names as one text: a thousand nodes of YAML take longer than a comparison may
    effect: str = ""
    reason: str = ""
    judged_by: str = ""
    names: str = ""


@dataclass
class _Schema:
    schema: int = 1
    arguments: list[_Group] = field(default_factory=list)
    variables: list[_Group] = field(default_factory=list)
    versions: list[_Group] = field(default_factory=list)


@cache
def load_meanings() -> Meanings:
    """Return the tables that are shipped.

    Raises:
        ConfigError: a table does not fit its schema, or gives one name twice.
    """
    directory = data_directory("configs") / "meanings"
    files = [path for path in sorted(directory.glob("*.yaml")) if path.stem not in ("aliases", "forwarded")]
    return read_meanings(files)


def read_meanings(files: Iterable[Path]) -> Meanings:
    """Read tables.

    Raises:
        ConfigError: see ``load_meanings``.
    """
    found: dict[str, list[tuple[str, Meaning]]] = {"arguments": [], "variables": [], "versions": []}
    for path in files:
        plain = read_document(path, _Schema, kind="table of meanings", remedy="see docs/verify.md")
        for section, entries in found.items():
            entries += [entry for group in plain[section] for entry in _entries(group, path)]
    for section, entries in found.items():
        _once([name for name, _ in entries], section)
    return Meanings(
        arguments=dict(found["arguments"]),
        variables=tuple(found["variables"]),
        versions=dict(found["versions"]),
    )


def _entries(group: Mapping[str, Any], path: Path) -> list[tuple[str, Meaning]]:
    effects = [effect.value for effect in Effect]
    if group["effect"] not in effects or group["judged_by"] not in JUDGES or not group["reason"]:
        raise ConfigError(
            "an entry without effect or reason",
            where=str(path),
            found=f"effect {group['effect']!r}, judged_by {group['judged_by']!r}, reason {group['reason']!r}",
            expected=f"effect one of {', '.join(effects)}; judged_by one of {', '.join(JUDGES[1:])}",
        )
    meaning = Meaning(effect=Effect(group["effect"]), reason=group["reason"], judged_by=group["judged_by"])
    return [(name, meaning) for name in group["names"].split()]


def _once(names: list[str], section: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) != len(names) else []
    if twice:
        raise ConfigError("given twice", where=f"configs/meanings: {section}", found=", ".join(twice))


__all__ = ["Effect", "Meaning", "Meanings", "load_meanings", "read_meanings"]
