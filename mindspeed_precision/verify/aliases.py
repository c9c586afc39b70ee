"""Configurations of other frameworks under Megatron's names (``configs/meanings/aliases.yaml``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from mindspeed_precision.config import data_directory, read_document
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.foreign_yaml import read_yaml

_WAYS = ("same", "not", "is", "lower", "pair")


@dataclass(frozen=True, kw_only=True)
class Alias:
    """What one name of another framework says.

    Attributes:
        name: the end of a dotted path.
        arguments: Megatron's names of it.
        by: how the value is turned into Megatron's.
        values: of the way ``is``: for which of them the switch is on, in small letters.
    """

    name: str
    arguments: tuple[str, ...]
    by: str
    values: frozenset[str] = frozenset()

    def convert(self, value: Any) -> dict[str, Any]:
        """Return the value under Megatron's names; nothing where it is not given."""
        if value is None:
            return {}
        if self.by == "pair":
            values = value if isinstance(value, (list, tuple)) else ()
            return dict(zip(self.arguments, values, strict=False))
        one = {
            "same": value,
            "not": not value,
            "is": str(value).lower() in self.values,
            "lower": str(value).lower().replace("adamw", "adam"),
        }[self.by]
        return dict.fromkeys(self.arguments, one)


@dataclass
class _Alias:
    name: str = ""
    argument: str = ""
    by: str = "same"
    values: str = ""


@dataclass
class _Schema:
    schema: int = 1
    aliases: list[_Alias] = field(default_factory=list)


@cache
def load_aliases() -> Mapping[str, Alias]:
    """Return the aliases that are shipped, by name.

    Raises:
        ConfigError: the file does not fit its schema.
    """
    path = data_directory("configs") / "meanings" / "aliases.yaml"
    plain = read_document(path, _Schema, kind="table of aliases", remedy="see docs/verify.md")
    found = {}
    for entry in plain["aliases"]:
        if entry["by"] not in _WAYS or not entry["name"] or not entry["argument"]:
            where, expected = f"{path}: {entry['name']}", f"by one of {', '.join(_WAYS)}"
            raise ConfigError("no alias", where=where, found=repr(entry["by"]), expected=expected)
        found[entry["name"]] = Alias(
            name=entry["name"],
            arguments=tuple(entry["argument"].split()),
            by=entry["by"],
            values=frozenset(entry["values"].split()),
        )
    return found


def alias_of(path: str) -> Alias | None:
    """Return the alias that speaks of a dotted path: the longest name that its end fits; None: none does."""
    aliases, parts = load_aliases(), path.split(".")
    for start in range(len(parts)):
        found = aliases.get(".".join(parts[start:]))
        if found is not None:
            return found
    return None


def under_megatrons_names(
    config: Mapping[str, Any], known: frozenset[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return what a nested configuration says under Megatron's names, and the paths that nothing is known of.

    Args:
        config: nested mappings, as read from a file.
        known: Megatron's names, which stand for themselves.
    """
    found: dict[str, Any] = {}
    unknown = []
    for path, value in _leaves(config, ""):
        alias, last = alias_of(path), path.rpartition(".")[2]
        if alias is not None:
            found |= {name: one for name, one in alias.convert(value).items() if name not in found}
        elif last in known:
            found.setdefault(last, value)
        else:
            unknown.append(path)
    return found, unknown


def _leaves(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, Mapping):
            yield from _leaves(value, path)
        else:
            yield path, value


def read_configuration(file: str | Path) -> dict[str, Any]:
    """Read the YAML file with which a run was launched: MindFormers', or Megatron's ``--yaml-cfg``.

    Raises:
        ConfigError: it is missing, or no YAML mapping.
    """
    path = Path(file)
    if not path.is_file():
        raise ConfigError("no such configuration file", where=str(file), expected="a YAML file")
    try:
        plain = read_yaml(path)
    except ConfigError:
        raise
    except Exception as error:  # YAML has many errors, and no common one
        found = " ".join(str(error).split())[:120]
        raise ConfigError("not readable as YAML", where=str(path), found=found) from error
    if not isinstance(plain, dict):
        raise ConfigError("not a mapping", where=str(path), found=type(plain).__name__)
    return {str(name): value for name, value in plain.items()}
