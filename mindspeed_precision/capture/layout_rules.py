"""How the activations of a module are split, as data: ``patches/layouts/*.yaml`` read into frozen rules.

A tensor is written as its dimensions, as one would on paper: ``s/sp b h`` is ``[sequence, batch, hidden]``,
the first of them split over the tensor-parallel group where sequence parallelism is on. Dimensions of the
letters ``TOKENS`` are split over the context-parallel group, too, where there is one.
``patches/layouts/megatron.yaml`` says how each is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mindspeed_precision.config import data_directory, read_document
from mindspeed_precision.errors import ConfigError

GROUPS = ("tp", "sp", "etp")
"""What a dimension can be split over, or a sum goes over: the tensor-parallel group; the same under sequence
parallelism; the ranks that an expert is split over."""

TOKENS = ("s", "t")
"""Letters of dimensions along which tokens lie: of one sequence, or of all samples."""

KEYS = "k"
"""Letter of the tokens that attention looks at: of the whole sequence, in an order of its own."""

ROUTED = "r"
"""Letter of the tokens that were sent to one expert."""

ANY_SLOT = "*"
ANY_SHAPE = "..."
_REMEDY = "see patches/README.md"
_DIMENSION = re.compile(r"([a-z]+)(?:/(?:([a-z]+)|weight\[([01])\]))?")
_SUM = re.compile(r"(.*?)(?: \+([a-z]+))?")


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """One dimension of a tensor.

    Attributes:
        name: its letter.
        group: over which group it is split; empty for none.
        weight: as which dimension of the module's weight it is split; None: as none.
    """

    name: str
    group: str = ""
    weight: int | None = None


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a tensor is split.

    Attributes:
        text: as it is written.
        dimensions: one for each; None: whole, whatever its shape.
        summed: over which group the canonical tensor is the sum of what the ranks hold; empty for none.
    """

    text: str
    dimensions: tuple[Dimension, ...] | None
    summed: str = ""


@dataclass(frozen=True, kw_only=True)
class LayoutRule:
    """How the tensors of some modules are split.

    Attributes:
        classes: names of classes; a module of one of them, or of a class that derives from it, fits. Empty:
            any.
        fqn: patterns of names; empty: any.
        when: attributes that the module has.
        forms: by role (``input``, ``output``, ``grad_input``, ``grad_output``, ``gemm``) and slot.
        unknown: why a tensor of no slot here has no rule; empty: it is not known.
    """

    classes: tuple[str, ...]
    fqn: tuple[str, ...]
    when: Mapping[str, object]
    forms: Mapping[str, Mapping[str, Form]]
    unknown: str = ""

    def fits(self, fqn: str, module: Any) -> bool:
        """Tell whether the rule speaks of a module."""
        return (
            (not self.classes or any(kind.__name__ in self.classes for kind in type(module).__mro__))
            and (not self.fqn or any(fnmatchcase(fqn, pattern) for pattern in self.fqn))
            and all(getattr(module, name, None) == value for name, value in self.when.items())
        )

    def form(self, role: str, slot: str) -> Form | None:
        """Return how a tensor is split; a gradient is where nothing else is said split as what it is of."""
        for name in (role, role.removeprefix("grad_")):
            slots = self.forms.get(name, {})
            if slot in slots or ANY_SLOT in slots:
                return slots.get(slot) or slots[ANY_SLOT]
        return None


_ROLES = ("input", "output", "grad_input", "grad_output", "gemm")


@dataclass
class _Rule:
    classes: list[str] = field(default_factory=list)
    fqn: Any = field(default_factory=list)
    when: dict[str, Any] = field(default_factory=dict)
    unknown: str = ""
    input: dict[str, str] = field(default_factory=dict)
    output: dict[str, str] = field(default_factory=dict)
    grad_input: dict[str, str] = field(default_factory=dict)
    grad_output: dict[str, str] = field(default_factory=dict)
    gemm: dict[str, str] = field(default_factory=dict)


@dataclass
class _File:
    schema: int = 1
    name: str = ""
    rules: list[_Rule] = field(default_factory=list)


def load_layout_rules(search_path: Sequence[str | Path] = ()) -> tuple[LayoutRule, ...]:
    """Read the rules of the user's directories, then those that ship: the first that fits a module counts.

    Args:
        search_path: directories of declarations (``patches.search_path``); rules are in their folder
            ``layouts``.

    Raises:
        ConfigError: a file does not fit the schema; with the file and the rule in ``where``.
    """
    directories = [*map(Path, search_path), data_directory("patches")]
    files = [file for directory in directories for file in sorted((directory / "layouts").glob("*.yaml"))]
    return tuple(rule for file in files for rule in load_file(file))


def load_file(file: Path) -> tuple[LayoutRule, ...]:
    """Read one file of rules.

    Raises:
        ConfigError: with the file and the rule in ``where``.
    """
    plain = read_document(file, _File, kind="layout rules", remedy=_REMEDY)
    if plain["name"] != file.stem:
        raise ConfigError(
            "not the name of the file", where=f"{file}: name", found=plain["name"], expected=file.stem
        )
    return tuple(_rule(f"{file}: rules[{index}]", rule) for index, rule in enumerate(plain["rules"]))


def _rule(where: str, plain: Mapping[str, Any]) -> LayoutRule:
    patterns = plain["fqn"]
    patterns = [patterns] if isinstance(patterns, str) else patterns
    named = isinstance(patterns, list) and all(isinstance(pattern, str) for pattern in patterns)
    if not named or not (patterns or plain["classes"]):
        raise ConfigError("speaks of no module", where=where, expected="classes or fqn", remedy=_REMEDY)
    forms = {
        role: {slot: _form(f"{where}.{role}.{slot}", text) for slot, text in plain[role].items()}
        for role in _ROLES
        if plain[role]
    }
    if not forms and not plain["unknown"]:
        raise ConfigError("says nothing", where=where, expected="input, output or unknown", remedy=_REMEDY)
    return LayoutRule(
        classes=tuple(plain["classes"]),
        fqn=tuple(patterns),
        when=plain["when"],
        forms=forms,
        unknown=plain["unknown"],
    )


def _form(where: str, text: str) -> Form:
    """Read ``s/sp b h`` or ``s b h +tp``.

    Raises:
        ConfigError: it is none.
    """
    found = _SUM.fullmatch(text.strip())
    shape, summed = (found.group(1), found.group(2) or "") if found else ("", "")
    if summed and summed not in GROUPS:
        raise ConfigError("no such group", where=where, found=summed, expected=" or ".join(GROUPS))
    dimensions = None if shape == ANY_SHAPE else tuple(_dimensions(where, shape.split()))
    if dimensions == ():
        raise ConfigError("no dimensions", where=where, found=repr(text), expected="s/sp b h, or ...")
    return Form(text=text, dimensions=dimensions, summed=summed)


def _dimensions(where: str, words: Iterable[str]) -> Iterable[Dimension]:
    for word in words:
        found = _DIMENSION.fullmatch(word)
        if found is None or (found.group(2) and found.group(2) not in GROUPS):
            expected = f"s, s/{', s/'.join(GROUPS)} or s/weight[0]"
            raise ConfigError("no dimension", where=where, found=word, expected=expected, remedy=_REMEDY)
        name, group, weight = found.groups()
        yield Dimension(name=name, group=group or "", weight=None if weight is None else int(weight))
