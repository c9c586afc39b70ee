"""The effective configuration of a run, by section, under Megatron's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_precision.dump.reader import Run
from mindspeed_precision.meanings import load_meanings, without_framework
from mindspeed_precision.verify.aliases import alias_of, under_megatrons_names

SECTIONS = ("megatron_args", "transformer_config", "ddp_config", "optimizer_config")
"""Megatron's arguments after validation, and the configuration objects that model and optimizer use."""

_FOREIGN = "model_config"
_GIVEN = "file"


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What a run says of its configuration.

    Attributes:
        sections: by section, values by Megatron's names.
        unknown: paths of another framework's configuration that nothing is known of.
    """

    sections: Mapping[str, Mapping[str, Any]]
    unknown: tuple[str, ...] = ()

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Megatron's arguments alone; of another framework, what its configuration says of them."""
        return self.sections.get("megatron_args") or self.merged

    @property
    def merged(self) -> dict[str, Any]:
        """One value for each name: of the object that uses it, else of what was asked for."""
        found: dict[str, Any] = {}
        for values in self.sections.values():
            found |= values
        return found


def settings_of(run: Run, given: Mapping[str, Any] | None = None) -> RunSettings:
    """Return the configuration of a run.

    Args:
        run: the run.
        given: what it was launched with, read from a file, where ``run.json`` does not say.
    """
    config = run.manifest.get("config")
    recorded = config if isinstance(config, dict) else {}
    sections = {
        name: dict(recorded[name])
        for name in SECTIONS
        if isinstance(recorded.get(name), dict) and recorded[name]
    }
    known = frozenset(load_meanings().arguments)
    unknown: list[str] = []
    for name, foreign in ((_FOREIGN, recorded.get(_FOREIGN)), (_GIVEN, given)):
        if isinstance(foreign, Mapping) and foreign:
            sections[name], more = under_megatrons_names(foreign, known)
            unknown += more
    return RunSettings(sections=sections, unknown=tuple(unknown))


def spelled(section: str, name: str) -> str:
    """Return the argument's name of a field of a configuration object."""
    alias = None if section == "megatron_args" else alias_of(f"{section}.{name}")
    return alias.arguments[0] if alias is not None and alias.by == "same" else name


def normal(value: Any) -> Any:
    """Return a value as it is compared: 1 is 1.0, ``torch.bfloat16`` is ``bfloat16``, a tuple is a list."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, str):
        text = without_framework(value)
        try:
            return float(text)
        except ValueError:
            return text
    if isinstance(value, (list, tuple)):
        return [normal(item) for item in value]
    return value


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One name with two values.

    Attributes:
        name: Megatron's name.
        baseline: its value there; None: not set.
        candidate: likewise.
        sections: where they differ.
    """

    name: str
    baseline: Any
    candidate: Any
    sections: tuple[str, ...] = field(default=())

    def line(self, reason: str) -> str:
        """Return it as one line of evidence."""
        where = "" if not self.sections or "megatron_args" in self.sections else f" ({self.sections[0]})"
        why = f": {reason}" if reason else ""
        return f"{self.name}{where}: {self.baseline} in the baseline, {self.candidate} in the candidate{why}"


def differences(one: RunSettings, two: RunSettings) -> tuple[int, list[Difference]]:
    """Return how many names both runs give a value, and those that differ.

    A name is compared section by section where both runs have the section; what one run alone says of it
    counts only there. Where they share no section, what either run uses in the end is compared.
    """
    common = [name for name in one.sections if name in two.sections]
    found: dict[str, Difference] = {}
    looked: set[str] = set()
    pairs = [(name, one.sections[name], two.sections[name]) for name in common]
    if not pairs:
        both = one.merged.keys() & two.merged.keys()
        pairs = [("", {n: one.merged[n] for n in both}, {n: two.merged[n] for n in both})]
    for section, left, right in pairs:
        for own in {**left, **right}:
            name = spelled(section, own)
            looked.add(name)
            if _same(left.get(own), right.get(own)):
                continue
            earlier = found.get(name)
            sections = (*(earlier.sections if earlier else ()), *((section,) if section else ()))
            values = (earlier.baseline, earlier.candidate) if earlier else (left.get(own), right.get(own))
            found[name] = Difference(name=name, baseline=values[0], candidate=values[1], sections=sections)
    return len(looked), sorted(found.values(), key=lambda difference: difference.name)


def _same(one: Any, two: Any) -> bool:
    left, right = normal(one), normal(two)
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)
