"""Which arguments Megatron, MindSpeed and MindSpeed-LLM have: ``configs/preflight/arguments.yaml``."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from mindspeed_precision.arguments import add_flags
from mindspeed_precision.config import data_directory, read_document

ANY_NUMBER = -1
_CLOSE = 0.88
"""Share of letters in common from which an unknown name is taken for a misspelling of a known one."""


@dataclass
class _Owner:
    of: str = ""
    source: str = ""
    switches: str = ""
    values: str = ""
    lists: str = ""


@dataclass
class _Schema:
    schema: int = 0
    arguments: list[_Owner] = field(default_factory=list)
    negations: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    renames: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class KnownArguments:
    """The arguments there are.

    Attributes:
        values: how many values each takes, by name without dashes: 0, 1 or ``ANY_NUMBER``.
        owners: who has it (``megatron``, ``mindspeed``, ``mindspeed_llm``), by name.
        negations: switches that turn a setting off, with the setting.
        defaults: what Megatron takes for a setting that is not given; by setting.
        renames: names whose setting has another name.
    """

    values: Mapping[str, int]
    owners: Mapping[str, str]
    negations: Mapping[str, str]
    defaults: Mapping[str, Any]
    renames: Mapping[str, str]

    def setting(self, name: str) -> str:
        """Return the setting that the argument ``name`` (without dashes) gives: Megatron's ``dest``."""
        return self.negations.get(name) or self.renames.get(name) or name.replace("-", "_")

    @cached_property
    def settings(self) -> frozenset[str]:
        """Every setting that some argument gives."""
        return frozenset(map(self.setting, self.values))

    @cached_property
    def switched(self) -> frozenset[str]:
        """Settings that are on or off."""
        return frozenset(self.setting(name) for name, count in self.values.items() if count == 0)

    def closest(self, name: str) -> str:
        """Return the known name that ``name`` looks like; empty where none is close."""
        plain = name.replace("_", "-").lower()
        if plain in self.values:
            return plain
        found = difflib.get_close_matches(plain, self.values, n=1, cutoff=_CLOSE)
        return found[0] if found else ""


def _our_own() -> dict[str, int]:
    """Return how many values each of this tool's own flags takes."""
    flags = add_flags(argparse.ArgumentParser(add_help=False))._actions
    counts = {0: 0, None: 1, "*": ANY_NUMBER}
    return {flag.removeprefix("--"): counts[one.nargs] for one in flags for flag in one.option_strings}


@lru_cache(maxsize=1)
def known_arguments() -> KnownArguments:
    """Read the table.

    Raises:
        ConfigError: the file is no such table.
    """
    path = data_directory("configs") / "preflight" / "arguments.yaml"
    plain = read_document(path, _Schema, kind="table of arguments", remedy="see docs/preflight.md")
    values = _our_own()
    owners = dict.fromkeys(values, "mindspeed_precision")
    for owner in plain["arguments"]:
        for kind, count in (("switches", 0), ("values", 1), ("lists", ANY_NUMBER)):
            for name in owner[kind].split():
                values[name], owners[name] = count, owner["of"]
    return KnownArguments(
        values=values,
        owners=owners,
        negations=plain["negations"],
        defaults=plain["defaults"],
        renames=plain["renames"],
    )
